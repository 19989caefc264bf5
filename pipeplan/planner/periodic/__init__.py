"""Which plan has the shortest period, as far as it is looked for?"""
