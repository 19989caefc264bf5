"""Example models and data that run anywhere."""
