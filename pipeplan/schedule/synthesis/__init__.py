"""Which order of a drained mini-batch's passes takes least time, within memory, and how far from the best can it be?"""
