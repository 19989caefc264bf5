"""What a rank keeps and does for its stages: weights, versions, updates, checkpoints."""
