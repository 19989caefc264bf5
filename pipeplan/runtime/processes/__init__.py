"""How do processes become ranks, and learn of each other's end?"""
