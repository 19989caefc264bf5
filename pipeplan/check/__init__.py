"""Is a plan right, how good is it, and how good could one be?"""
