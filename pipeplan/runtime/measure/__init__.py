"""What was measured, beside what was planned?"""
