"""Which commands measure, estimate and train models?"""
