"""What every strategy must keep, as checks that anyone can run on their own."""
