"""What does one rank do from its first to its last instruction?"""
