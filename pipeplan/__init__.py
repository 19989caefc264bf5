"""pipeplan splits a neural network over GPUs for pipeline-parallel training and proves the plan good."""

__version__ = "0.1.0"
