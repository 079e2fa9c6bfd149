"""A recorded run under another scheduling strategy, on a virtual clock."""
