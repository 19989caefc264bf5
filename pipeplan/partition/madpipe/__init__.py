"""Which plan is best if one device may hold several stages? MadPipe's dynamic programs."""
