"""Which grid of equal pipelines, message-driven, is done first with a batch?"""
