"""Which commands look at a plan that there is, or hand it on?"""
