"""Where do samples come from, and who reads them?"""
