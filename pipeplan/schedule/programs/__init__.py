"""In which order does each schedule run the passes of a mini-batch? A file a schedule."""
