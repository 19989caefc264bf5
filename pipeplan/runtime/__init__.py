"""Running plans on torch.distributed; the only package besides the zoo that imports torch."""
