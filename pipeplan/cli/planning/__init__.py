"""Which commands search for a plan?"""
