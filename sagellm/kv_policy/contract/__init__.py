"""What every eviction policy must keep, as checks that anyone can run on their own."""
