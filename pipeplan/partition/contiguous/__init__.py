"""Which contiguous allocation is best? The exact search."""
