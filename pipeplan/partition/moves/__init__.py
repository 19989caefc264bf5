"""Which allocations lie near one that is known, and where do steps between them lead?"""
