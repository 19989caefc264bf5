"""How do gradients become new weights?"""
