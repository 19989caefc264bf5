"""What can be asked of a plan that was found or read? Its figures, pictures, runs in simulation, exports and files."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..check.evaluate import Evaluation, gap
from ..files.plans import any_class_bound, gpus_of, plan_text
from ..files.text import write_text
from ..names import shown
from ..plan import Bound, Plan
from ..registry import Late
from ..units import format_ns
from .door import door

if TYPE_CHECKING:
    from ..planner.simulated.simulation import Simulation
    from ..runtime.lowering.instructions import Instruction

print_plan, chart_html = Late("report.tables.plan:print_plan"), Late("report.page.html:chart_html")
report_page: Callable[..., tuple[str, int]] = Late("api.plans:report_page")
PRINTED = {"grid": Late("report.tables.searches:print_grids")}  # what an algorithm's plans are printed by, else that


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage: its layers by name, its GPUs, and of one microbatch the times (ns) with what is recomputed; on its GPU
    the microbatches ``in_flight`` and, for all stages of that GPU together, the peak and what it has (bytes).

    ``tensor`` of its GPUs run each layer together.
    """

    layers: tuple[str, ...]
    gpus: tuple[int, ...]
    forward_ns: int
    backward_ns: int
    recomputed: tuple[str, ...]
    in_flight: int
    peak_bytes: int
    memory_bytes: int
    tensor: int = 1


@dataclass(frozen=True, slots=True)
class Rank:
    """What one process of a run does: on which GPU, with which layers by stage, and in which order.

    Its ``program`` has passes, messages to and from other ranks, sums over replicas, and updates: see
    :mod:`..runtime.lowering.instructions`. Microbatches and versions of the weights count from 0.
    """

    rank: int
    gpu: int
    layers: dict[int, tuple[str, ...]]
    program: tuple[Instruction, ...]


@dataclass(frozen=True, repr=False)
class PlanResult:
    """A plan that has passed the validator, with its figures; ``print`` says it in a line, ``show`` prints its table,
    and notebooks show both that and its chart.

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
                tensor=stage.tensor * self.plan.chain.tensor,
            )
            for stage, cost, use, in_flight, _ in stage_figures(self.plan, self.evaluation)
        )

    def row(self) -> dict[str, Any]:
        """Return its figures as one row of a table, such as one of plans for several machines."""
        plan = self.plan
        return {
            "network": plan.chain.name,
            "gpus": len(plan.platform.whole or plan.platform),
            "samples": plan.chain.microbatch * plan.interval,
            "weights": plan.policy.weights,
            "schedule": plan.schedule.kind,
            "stages": len(plan.allocation.stages),
            "period_ns": self.period_ns,
            "bound_ns": self.bound_ns,
            "gap": self.gap,
            "samples_per_second": self.samples_per_second,
            "peak_bytes": max(x.peak_bytes for x in self.evaluation.devices),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each stage: the fields of :class:`StageFigures`."""
        return [asdict(x) for x in self.stages]

    @door
    def ranks(self, steps: int = 1) -> tuple[Rank, ...]:
        """Return what each rank does in so many ``steps``, for a training loop of your own.

        BadInput for a plan that only simulation can run.
        """
        from ..runtime.lowering.lowered_run import lower_run

        run, stages = lower_run(self.plan, steps), self.stages
        on = [{s: x.layers for s, x in enumerate(stages) if gpu in x.gpus} for gpu in run.devices]
        return tuple(
            Rank(rank, gpu, layers, tuple(program))
            for rank, (gpu, layers, program) in enumerate(zip(run.devices, on, run.instructions, strict=True))
        )

    @door
    def simulate(self, schedule: str | None = None, microbatches: int | None = None, **options: Any) -> Simulation:
        """Return its run under ``schedule`` (None: its own), such as ``"zbv"``; ``options`` as in :func:`simulations`.

        BadInput says why it cannot run so.
        """
        from .plans import refuse_unknown, simulations

        names = () if schedule is None else (schedule,)
        refuse_unknown([name for name in names if not name.endswith(".csv")])
        return door(simulations)(self.plan, names, microbatches, **options)[0][0]

    @door
    def schedules(self, *names: str, microbatches: int | None = None, **options: Any) -> list[Simulation]:
        """Return its runs under the schedules that are named, or all that it can run under, best first."""
        from .plans import ALL, simulations

        return door(simulations)(self.plan, names or (ALL,), microbatches, **options)[0]

    @door
    def report(
        self, path: str | Path, *schedules: str, microbatches: int | None = None, trace: str | Path | None = None
    ) -> int:
        """Write it as one self-contained HTML page, under its own schedule, or several side by side; with ``trace`` the
        run that it has the times of as well. Return how many microbatches of its run the page shows."""
        text, count = report_page(self.plan, schedules, microbatches, None if trace is None else str(trace))
        write_text(str(path), text)
        return count

    @door
    def export(self, target: str, path: str | Path | None = None, **options: Any) -> str:
        """Return it in the terms of ``target``, such as ``"megatron"``, and write it where there is a ``path``.

        ``options`` as in :func:`.exporting.exported`. CannotExpress says what the target has no words for.
        """
        from .plans import exported

        made = door(exported)(self.plan, target, "-" if path is None else str(path), **options)
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
        found = PRINTED.get(self.plan.provenance.algorithm, print_plan)
        found(self.plan, self.assumptions, width, self.evaluation, verbose)

    def __repr__(self) -> str:
        stages, platform = self.plan.allocation.stages, self.plan.platform
        return (
            f"<PlanResult {shown(self.plan.chain.name)} on {len(platform.whole or platform)} GPUs: {len(stages)} "
            f"stage{'' if len(stages) == 1 else 's'}, period {format_ns(self.period_ns)}, bound "
            f"{format_ns(self.bound_ns)}, gap {self.gap:.2%}>"
        )

    def _repr_html_(self) -> str:
        told = io.StringIO()
        with redirect_stdout(told):
            self.show()
        return f"<pre style='line-height:1.2'>{html.escape(told.getvalue())}</pre>{chart_html(self.plan)}"
