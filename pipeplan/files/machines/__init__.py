"""Which GPUs, and which platform of them?"""
