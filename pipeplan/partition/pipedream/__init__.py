"""PipeDream's optimizer, as printed and as released."""
