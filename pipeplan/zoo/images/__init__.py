"""Models of images: convolutional networks."""
