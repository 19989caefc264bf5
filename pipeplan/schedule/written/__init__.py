"""What of schedules that somebody wrote down: are they whole, do they come through, how do stages run them?"""
