"""What does each layer of a model cost, measured or estimated?"""
