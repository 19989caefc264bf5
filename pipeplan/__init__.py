"""pipeplan splits a neural network over GPUs for pipeline-parallel training and proves the plan good.

    import pipeplan as pp

    found = pp.plan("profile.json", gpus=4, mem="16GB")
    print(found)
    found.save("plan.json")

A name is imported from its home when it is first used, so that ``import pipeplan`` is instant.
"""

from __future__ import annotations

import sys

from .version import __version__ as __version__

TYPE_CHECKING = False  # as typing says it, which takes longer to load than all of this
if TYPE_CHECKING:
    from .api.comparing import Comparison as Comparison
    from .api.door import compare as compare
    from .api.door import grid as grid
    from .api.door import plan as plan
    from .api.door import profile as profile
    from .api.door import read_plan as read_plan
    from .api.door import read_profile as read_profile
    from .api.profiles import Profile as Profile
    from .api.result import PlanResult as PlanResult
    from .errors import BadInput as BadInput
    from .errors import Infeasible as Infeasible
    from .errors import PipeplanError as PipeplanError
    from .problem import Platform as Platform
    from .runtime.processes.launch import run_plan as run_plan
else:
    _HOMES = {
        **dict.fromkeys(("plan", "grid", "compare", "profile", "read_plan", "read_profile"), "api.door"),
        "Profile": "api.profiles",
        "Comparison": "api.comparing",
        "PlanResult": "api.result",
        **dict.fromkeys(("PipeplanError", "BadInput", "Infeasible"), "errors"),
        "Platform": "problem",
        "run_plan": "runtime.processes.launch",
    }

    def __getattr__(name):
        """Return a public name from its home."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{_HOMES[name]}", __name__), name)

    def __dir__():
        """Return the public names, used or not, beside what is here already."""
        return [*globals(), *_HOMES]

    class _Package(type(sys)):
        """``pipeplan.plan`` is the function, also when its namesake, the file of nouns, has been imported."""

        def __setattr__(self, name, value):
            if not (name in _HOMES and isinstance(value, type(sys))):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package
