"""What is on disk?"""
