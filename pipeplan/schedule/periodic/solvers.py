"""How is an integer program solved? By CBC or HiGHS, within limits, and not longer than anybody waits for it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from dataclasses import dataclass
from math import inf
from traceback import walk_tb
from typing import Any

from ...choices import Solver as Solver
from ...errors import PipeplanError
from ...scratch import scratch_folder

STOP_S = 2.0  # that HiGHS may take to notice that it shall stop; its thread ends nobody's process
TOLERANCE = 1e-6  # what a solver's arithmetic is trusted to, relative


class SolverFailed(PipeplanError):
    """A solver that runs on this machine gave no answer to one problem: it crashed, or lost its way in rounding."""


@dataclass(frozen=True, slots=True)
class SolverLimits:
    """What ends a search: so many ``nodes``, seconds of its own, or seconds on the clock, whichever comes first.

    Nodes are the same on every machine. ``own_s`` are of CPU time with CBC, while nobody limits ``clock_s``; HiGHS
    only knows the clock.
    """

    nodes: int | None = None
    own_s: float = 60.0
    clock_s: float = inf

    @property
    def seconds(self) -> float:
        """Seconds, of either kind, until the search ends."""
        return max(0.01, min(self.own_s, self.clock_s))

    def less(self, seconds: float) -> SolverLimits:
        """Return what is left after so many seconds."""
        return SolverLimits(self.nodes, self.own_s - seconds, self.clock_s - seconds)


def solved(problem: Any, solver: Solver, limits: SolverLimits) -> float:
    """Have ``solver`` solve a PuLP problem within the limits; return the seconds that it took, of the limited kind.

    SolverFailed where it has no answer.
    """
    import pulp

    with warnings.catch_warnings(), scratch_folder() as folder:
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces names of PuLP 4
        solving = _SOLVERS[solver](pulp, limits)
        solving.tmpDir = str(folder)
        began = _seconds(solver, limits)
        try:
            problem.solve(solving)
        except pulp.PulpSolverError as error:
            raise SolverFailed(f"the solver {solver} failed: {error}") from error
        except BaseException as error:
            _kill_solver(error)
            raise
        return _seconds(solver, limits) - began


def _own_time(solver: Solver, limits: SolverLimits) -> bool:
    """Whether the seconds of the limits are of the solver's own CPU time."""
    return solver == "cbc" and limits.clock_s == inf


def _seconds(solver: Solver, limits: SolverLimits) -> float:
    """Return the seconds, of the kind that is limited, since some moment."""
    return os.times().children_user if _own_time(solver, limits) else time.monotonic()


def _kill_solver(error: BaseException) -> None:
    """End the process of a solver whose wait ``error`` has ended: PuLP doesn't."""
    for frame, _ in walk_tb(error.__traceback__):
        for found in frame.f_locals.values():
            if isinstance(found, subprocess.Popen):
                found.kill()
                found.wait()


def _cbc(pulp: Any, limits: SolverLimits) -> Any:
    # no threads option: CBC is single-threaded without it, and with "threads 1" now and then waits 10 s for itself
    solver = pulp.PULP_CBC_CMD(
        msg=False,
        timeLimit=limits.seconds,
        timeMode="cpu" if _own_time("cbc", limits) else "elapsed",
        maxNodes=limits.nodes,
        gapRel=0,
        gapAbs=0,
        options=["randomSeed 1", "randomCbcSeed 1"],
    )
    if not solver.available():
        raise PipeplanError("the solver CBC, which PuLP 3 brings along, does not run on this machine; choose highs")
    return solver


_NO_ANSWER = {"kNotset", "kLoadError", "kModelError", "kPresolveError", "kSolveError", "kPostsolveError", "kUnknown"}


def _highs(pulp: Any, limits: SolverLimits) -> Any:
    class Highs(pulp.HiGHS):  # type: ignore[misc]  # PuLP has no types
        def callSolver(self, lp: Any) -> None:
            model = lp.solverModel
            _in_a_thread(model)
            statuses, status = type(model.getModelStatus()), model.getModelStatus()
            if status == statuses.kSolutionLimit:  # by nodes; PuLP doesn't know it, but treats this one alike
                model.getModelStatus = lambda: statuses.kIterationLimit
            elif status.name in _NO_ANSWER:  # of which PuLP would read values that aren't there
                raise pulp.PulpSolverError(model.modelStatusToString(status))

    nodes = {} if limits.nodes is None else {"mip_max_nodes": limits.nodes}
    solver = Highs(msg=False, threads=1, timeLimit=limits.seconds, gapRel=0, gapAbs=TOLERANCE, random_seed=1, **nodes)
    if not solver.available():
        raise PipeplanError("the solver HiGHS is not installed: pip install highspy, or choose cbc")
    return solver


def _in_a_thread(model: Any) -> None:
    """Solve, and leave this thread what it needs for signals: what is raised here ends the solver, too."""
    ended = threading.Event()

    def run() -> None:
        try:
            model.run()
        finally:
            ended.set()

    model.HandleUserInterrupt = True
    threading.Thread(target=run, daemon=True).start()
    try:
        ended.wait()
    except BaseException:
        model.cancelSolve()
        ended.wait(STOP_S)
        raise


_SOLVERS = {"cbc": _cbc, "highs": _highs}


def refuse_lacking(solver: Solver) -> None:
    """Raise PipeplanError where a solver doesn't run on this machine."""
    import pulp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as above
        _SOLVERS[solver](pulp, SolverLimits())
