"""Moving KV blocks between engines."""
