"""pipeplan splits a neural network over GPUs for pipeline-parallel training and proves the plan good.

    from pipeplan import Platform, Problem, make_plan, print_plan, read_profile, simulate_plan

    plan = make_plan(Problem(read_profile("profile.json"), Platform.flat(4, 16 * 10**9))).plan
    print_plan(plan)
    print(simulate_plan(plan, microbatches=64).figures())

A name is imported from its home when it is first used, so that ``import pipeplan`` is instant.
"""

from __future__ import annotations

from .version import __version__ as __version__

TYPE_CHECKING = False  # as typing says it, which takes longer to load than all of this
if TYPE_CHECKING:
    from .check.evaluate import evaluate as evaluate
    from .check.validate import violations as violations
    from .files.plans import load_plan as load_plan
    from .files.plans import plan_text as plan_text
    from .files.profiles import read_profile as read_profile
    from .plan import Plan as Plan
    from .planner.plan import make_plan as make_plan
    from .planner.simulation import simulate_plan as simulate_plan
    from .problem import Chain as Chain
    from .problem import Platform as Platform
    from .problem import Policy as Policy
    from .problem import Problem as Problem
    from .report.tables import print_plan as print_plan
    from .runtime.launch import run_plan as run_plan
else:
    _HOMES = {
        **dict.fromkeys(("Chain", "Platform", "Policy", "Problem"), "problem"),
        "Plan": "plan",
        "read_profile": "files.profiles",
        "load_plan": "files.plans",
        "plan_text": "files.plans",
        "make_plan": "planner.plan",
        "violations": "check.validate",
        "evaluate": "check.evaluate",
        "simulate_plan": "planner.simulation",
        "print_plan": "report.tables",
        "run_plan": "runtime.launch",
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
