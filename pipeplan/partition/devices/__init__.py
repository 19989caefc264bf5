"""Which devices are alike, and in which order do stages meet them?"""
