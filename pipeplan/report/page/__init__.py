"""What is on the HTML page of a plan?"""
