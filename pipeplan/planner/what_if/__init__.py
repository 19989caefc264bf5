"""What if the problem, the plan or the target were another?"""
