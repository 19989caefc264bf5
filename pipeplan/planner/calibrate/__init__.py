"""Which constants make the plan's times those that were measured?"""
