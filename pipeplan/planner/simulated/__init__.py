"""What does a plan do under its own schedule, or any other, in simulation?"""
