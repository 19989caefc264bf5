"""How is a model made from what a user names, or a part of it?"""
