"""What every KV channel must keep, as checks that anyone can run on their own."""
