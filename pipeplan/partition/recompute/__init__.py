"""Which layers of a stage are recomputed, in which segments?"""
