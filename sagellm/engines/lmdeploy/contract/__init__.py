"""Contract suites that need a running engine."""
