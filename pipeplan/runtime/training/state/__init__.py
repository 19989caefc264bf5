"""What of a training is on disk, and how does it come back?"""
