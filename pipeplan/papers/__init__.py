"""Studies of the papers that pipeplan implements."""
