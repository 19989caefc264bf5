"""Models of text: decoders and recurrent networks, and what they are made of."""
