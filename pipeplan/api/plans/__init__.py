"""What is asked of a plan that there is?"""
