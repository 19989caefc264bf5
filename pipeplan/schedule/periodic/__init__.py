"""Periodic patterns: the best one of an allocation, exactly or by an integer program."""
