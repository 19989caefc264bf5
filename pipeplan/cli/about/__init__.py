"""Which commands tell of the program itself, and of this machine?"""
