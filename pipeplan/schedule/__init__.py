"""Schedulers: when each operation of a stage graph runs."""
