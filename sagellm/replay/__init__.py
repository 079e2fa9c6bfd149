"""Runs traces and recorded logs through the modules that serve in the engine, without one."""
