"""Proves patches, hooks and modules on a device that no continuous integration has."""
