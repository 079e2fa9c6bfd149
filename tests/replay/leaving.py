"""A module that ends the process that imports it."""

raise SystemExit(5)
