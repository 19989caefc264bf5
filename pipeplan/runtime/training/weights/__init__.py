"""Which weights does a pass see?"""
