"""Which plan, why none, and what if?"""
