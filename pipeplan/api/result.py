"""What can be asked of a plan that was found or read? Its figures, pictures, runs in simulation, exports and files."""

from __future__ import annotations

import html
import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..check.evaluate import Evaluation, gap
from ..files.plans import any_class_bound, gpus_of, plan_text
from ..files.text import write_text
from ..names import shown
from ..plan import Bound, Plan
from ..units import format_ns

if TYPE_CHECKING:
    from ..planner.simulated.simulation import Simulation


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage: its layers by name, its GPUs, and of one microbatch the times (ns) with what is recomputed; on its GPU
    the microbatches ``in_flight`` and, for all stages of that GPU together, the peak and what it has (bytes)."""

    layers: tuple[str, ...]
    gpus: tuple[int, ...]
    forward_ns: int
    backward_ns: int
    recomputed: tuple[str, ...]
    in_flight: int
    peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True, repr=False)
class PlanResult:
    """A plan that has passed the validator, with its figures; ``print`` shows the table, notebooks too.

    ``plan`` has everything that was given and decided, ``evaluation`` all figures in ns and bytes, ``assumptions`` in
    words what wasn't said.
    """

    plan: Plan
    evaluation: Evaluation
    assumptions: tuple[str, ...] = ()

    @property
    def period_ns(self) -> int:
        """The time of a microbatch in the long run."""
        return self.evaluation.period_ns

    @property
    def bound_ns(self) -> int:
        """What no plan's period is below."""
        return self._any_bound.period_ns

    @property
    def _any_bound(self) -> Bound:
        bound = any_class_bound(self.plan)
        assert bound is not None, "every plan quotes it"
        return bound

    @property
    def period(self) -> float:
        """The time of a microbatch in the long run, in seconds."""
        return self.period_ns / 1e9

    @property
    def bound(self) -> float:
        """What no plan's period is below, in seconds."""
        return self.bound_ns / 1e9

    @property
    def gap(self) -> float:
        """How far the period is above the bound: 0.05 is 5%."""
        return gap(self.period_ns, self._any_bound)

    @property
    def samples_per_second(self) -> float:
        """Samples that are trained on in a second; microbatches where the profile doesn't say their size."""
        return self.plan.chain.microbatch / self.period

    @property
    def stages(self) -> tuple[StageFigures, ...]:
        """The stages in the order of the layers."""
        from ..report.tables.plan import stage_figures

        names = [layer.name for layer in self.plan.chain.layers]
        return tuple(
            StageFigures(
                layers=tuple(names[stage.start : stage.stop]),
                gpus=gpus_of(self.plan.platform, stage),
                forward_ns=cost.forward_ns,
                backward_ns=cost.backward_ns,
                recomputed=tuple(name for start, stop in stage.checkpoint for name in names[start:stop]),
                in_flight=in_flight,
                peak_bytes=use.peak_bytes,
                memory_bytes=use.memory_bytes,
            )
            for stage, cost, use, in_flight, _ in stage_figures(self.plan, self.evaluation)
        )

    def simulate(self, schedule: str | None = None, microbatches: int | None = None, **options: Any) -> Simulation:
        """Return its run under ``schedule`` (None: its own), such as ``"zbv"``; ``options`` as in :func:`simulations`.

        BadInput says why it cannot run so.
        """
        from .plans import refuse_unknown, simulations

        names = () if schedule is None else (schedule,)
        refuse_unknown([name for name in names if not name.endswith(".csv")])
        return simulations(self.plan, names, microbatches, **options)[0][0]

    def schedules(self, *names: str, microbatches: int | None = None, **options: Any) -> list[Simulation]:
        """Return its runs under the schedules that are named, or all that it can run under, best first."""
        from .plans import ALL, simulations

        return simulations(self.plan, names or (ALL,), microbatches, **options)[0]

    def report(
        self, path: str | Path, *schedules: str, microbatches: int | None = None, trace: str | Path | None = None
    ) -> int:
        """Write it as one self-contained HTML page, under its own schedule, or several side by side; with ``trace`` the
        run that it has the times of as well. Return how many microbatches of its run the page shows."""
        from .plans import report_page

        text, count = report_page(self.plan, schedules, microbatches, None if trace is None else str(trace))
        write_text(str(path), text)
        return count

    def export(self, target: str, path: str | Path | None = None, **options: Any) -> str:
        """Return it in the terms of ``target``, such as ``"megatron"``, and write it where there is a ``path``.

        ``options`` as in :func:`.exporting.exported`. CannotExpress says what the target has no words for.
        """
        from .plans import exported

        made = exported(self.plan, target, "-" if path is None else str(path), **options)
        if path is not None:
            made.write()
        return made.text

    def text(self) -> str:
        """Return the JSON of the plan's file."""
        return plan_text(self.plan, self.evaluation)

    def save(self, path: str | Path) -> None:
        """Write the plan's file, atomically; ``pipeplan`` commands and :func:`.planning.read_plan` read it."""
        write_text(str(path), self.text())

    def show(self, width: int | None = None, verbose: bool = False) -> None:
        """Print the plan's table, as ``pipeplan plan`` does; ``verbose``: also what its bound follows from."""
        from ..planner.what_if.grid import ALGORITHM as GRID
        from ..report.tables.plan import print_plan
        from ..report.tables.searches import print_grids

        if self.plan.provenance.algorithm == GRID:
            print_grids(self.plan, self.assumptions, width, self.evaluation)
        else:
            print_plan(self.plan, self.assumptions, width, self.evaluation, verbose)

    def __str__(self) -> str:
        told = io.StringIO()
        with redirect_stdout(told):
            self.show()
        return told.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        stages, platform = self.plan.allocation.stages, self.plan.platform
        return (
            f"<PlanResult {shown(self.plan.chain.name)} on {len(platform.whole or platform)} GPUs: {len(stages)} "
            f"stage{'' if len(stages) == 1 else 's'}, period {format_ns(self.period_ns)}, bound "
            f"{format_ns(self.bound_ns)}, gap {self.gap:.2%}>"
        )

    def _repr_html_(self) -> str:
        return f"<pre style='line-height:1.2'>{html.escape(str(self))}</pre>"
