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
    from .api.calibrating import calibrate as calibrate
    from .api.comparing import Comparison as Comparison
    from .api.comparing import compare as compare
    from .api.comparing import import_plan as import_plan
    from .api.given.profiles import Profile as Profile
    from .api.given.profiles import read_profile as read_profile
    from .api.given.profiling import profile as profile
    from .api.grids import estimate as estimate
    from .api.grids import grid as grid
    from .api.planning import plan as plan
    from .api.planning import read_plan as read_plan
    from .api.result import PlanResult as PlanResult
    from .api.synthesizing import synthesize as synthesize
    from .errors import BadInput as BadInput
    from .errors import Infeasible as Infeasible
    from .errors import PipeplanError as PipeplanError
    from .problem import Platform as Platform
    from .runtime.engine.job import RunOptions as RunOptions
    from .runtime.model.build.spec import ModelSpec as ModelSpec
    from .runtime.processes.launch import run_plan as run_plan
else:
    _HOMES = {
        **dict.fromkeys(("plan", "read_plan"), "api.planning"),
        **dict.fromkeys(("grid", "estimate"), "api.grids"),
        **dict.fromkeys(("compare", "Comparison", "import_plan"), "api.comparing"),
        **dict.fromkeys(("read_profile", "Profile"), "api.given.profiles"),
        "profile": "api.given.profiling",
        "calibrate": "api.calibrating",
        "synthesize": "api.synthesizing",
        "PlanResult": "api.result",
        **dict.fromkeys(("PipeplanError", "BadInput", "Infeasible"), "errors"),
        "Platform": "problem",
        "run_plan": "runtime.processes.launch",
        "ModelSpec": "runtime.model.build.spec",
        "RunOptions": "runtime.engine.job",
    }
    __all__ = ["__version__", *_HOMES]

    def __getattr__(name):
        """Return a public name from its home, a function behind the door that checks its keywords."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        if not isinstance(found, type):
            from .api.door import door

            found = globals()[name] = door(found)
        return found

    def __dir__():
        """Return the public names, used or not."""
        return __all__

    class _Package(type(sys)):
        """``pipeplan.plan`` is the function, also when its namesake, the file of nouns, has been imported."""

        def __setattr__(self, name, value):
            if not (name in _HOMES and isinstance(value, type(sys))):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package
