"""Foundations of every other package: the hook contract, the plug-in guard, events, configuration, errors.

Nothing is imported here, so that `sagellm.core.errors` stays usable where only the standard library is installed.
"""
