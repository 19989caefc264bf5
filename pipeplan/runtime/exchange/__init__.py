"""How do tensors travel between ranks?"""
