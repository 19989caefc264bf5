"""Which version is this? Plans and profiles say which one made them."""

__version__ = "0.1.0"
