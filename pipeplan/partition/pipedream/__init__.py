"""Which plan does PipeDream's optimizer find?"""
