"""What do ``layers[start:stop]`` cost?"""
