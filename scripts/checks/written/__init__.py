"""Models as users write them, for scripts/checks/models.py: one file for each family, one row for each model."""
