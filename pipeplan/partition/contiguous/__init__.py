"""The exact search over contiguous allocations."""
