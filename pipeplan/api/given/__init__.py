"""What is given: a profile, a machine, and the problems that they are, by degrees."""
