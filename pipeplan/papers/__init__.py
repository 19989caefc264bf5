"""What do the papers say that pipeplan implements, computed anew? Studies."""
