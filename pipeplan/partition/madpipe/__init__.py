"""MadPipe's dynamic programs: one device may hold several stages."""
