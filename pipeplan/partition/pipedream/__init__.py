"""Which plan does PipeDream's optimizer find? As printed and as released."""
