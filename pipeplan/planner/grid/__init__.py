"""Which grid of pipelines by data parallelism?"""
