"""What every communication backend must keep, as checks that anyone can run on their own."""
