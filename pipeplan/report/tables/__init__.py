"""Which tables do commands print?"""
