"""Which periodic pattern of an allocation is best? Exactly, or by an integer program."""
