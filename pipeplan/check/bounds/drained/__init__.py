"""How soon can a drained mini-batch end at all? A file for each condition."""
