"""To be taken away: where the functions on files stood."""

from .plans import load_plan, plan_text, read_plan
from .platforms import read_platform
from .profiles import digest, profile_text, read_profile
from .text import read_text, write_text

__all__ = [
    "digest",
    "load_plan",
    "plan_text",
    "profile_text",
    "read_plan",
    "read_platform",
    "read_profile",
    "read_text",
    "write_text",
]
