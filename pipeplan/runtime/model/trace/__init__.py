"""How does a module become layers that compute what it computes?"""
