"""Which functions does ``import pipeplan as pp`` give? Those that commands call, behind the door."""

from __future__ import annotations

from . import comparing, planning, profiles
from .door import door

plan = door(planning.plan)
grid = door(planning.grid)
read_plan = door(planning.read_plan)
compare = door(comparing.compare)
profile = door(profiles.profile)
read_profile = door(profiles.read_profile)
