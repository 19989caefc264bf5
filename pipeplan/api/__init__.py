"""What does ``import pipeplan as pp`` give? The questions that can be asked, which the command line asks here too."""
