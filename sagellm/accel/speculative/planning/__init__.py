"""How long decode steps with guesses take on this machine: measured, kept in a file, and what follows from it."""
