"""What every speculative strategy must keep, and what an engine must keep that checks guesses: checks for anyone's own."""
