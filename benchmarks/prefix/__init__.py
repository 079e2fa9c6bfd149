"""A prefix index and its peers on one workload."""
