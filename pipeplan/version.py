"""Which version is this? Plans and profiles say which one made them; CONTRIBUTING says what its numbers mean."""

__version__ = "0.1.0.dev0"
