"""What do all stages that a search may choose take and hold?"""
