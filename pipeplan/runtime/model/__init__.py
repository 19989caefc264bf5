"""What is trained: any model as a network of layers."""
