"""What does each rank do, in which order? Without torch."""
