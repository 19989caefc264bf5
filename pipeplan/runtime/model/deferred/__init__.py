"""How are weights made only where they are needed?"""
