"""Which stages, on which devices, recomputing what, drain a mini-batch soonest?"""
