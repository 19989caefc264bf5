"""How do two profiles differ, layer by layer, and does a plan made from the one hold for the other? And what of a plan
was measured otherwise in a run of it, by operation, device and period?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from rich.text import Text

from ...check.evaluate import evaluate, gap
from ...cost.saved import saved_bytes
from ...cost.time_model import Passes
from ...names import shown
from ...plan import Plan
from ...planner.what_if.carry import Carried, Match, matched
from ...problem import Chain, Layer
from ...runtime.measure.times import planned_times, planned_transfer_ns
from ...runtime.measure.trace_file import MeasuredRun
from ...units import format_bytes, format_ns
from ..looks import LAYER_WIDTH, Name, console, make_table, print_fitted
from ..words import alone_ns, bound_class

MOST_ROWS = 30
SOURCE_WIDTH = 200  # columns of where a profile is from, which is a sentence


def difference_figures(
    before: Chain, after: Chain, pairs: Sequence[LayerPair], plan: Plan | None, result: Carried | None
) -> dict[str, Any]:
    """Return the figures of ``diff --json``; times in ns, sizes in bytes, ratios of B over A."""
    figures: dict[str, Any] = {
        "totals": [_totals(before), _totals(after)],
        "rank_correlation": _correlation(pairs),
        "layers": [
            {
                "name": pair.name,
                "names": pair.both(lambda x: x.name),
                "indices": pair.indices,
                "time_ns": pair.both(time_ns),
                "share_change": pair.share_change,
                "weight_bytes": pair.both(lambda x: x.weight_bytes),
                "output_bytes": pair.both(lambda x: x.output_bytes),
                "saved_bytes": pair.saved_bytes,
            }
            for pair in pairs
        ],
    }
    if plan is not None and result is not None:
        figures["plan"] = {
            "holds": not result.violations,
            "period_ns": [evaluate(plan).period_ns, result.period_ns],
            "violations": list(result.violations),
            "other_order_ns": result.other_order_ns,
        }
    return figures


def print_differences(before: Chain, after: Chain, pairs: Sequence[LayerPair], every: bool) -> None:
    """Print totals, and the layers whose share of the time changed most, in the order of the network."""
    out = console()
    for label, chain in (("A", before), ("B", after)):
        out.print(
            Text.assemble(
                (label, "bold"),
                f" {shown(chain.name)}: {len(chain)} layers, microbatch {chain.microbatch}, "
                f"{shown(chain.dtype)}, {shown(chain.device)}; {shown(chain.source, SOURCE_WIDTH)}",
            )
        )
    if before.microbatch != after.microbatch:
        out.print(f"note: microbatches of {before.microbatch} and {after.microbatch} samples are compared as they are")
    totals = _totals(before), _totals(after)
    for name, form in (("forward_ns", format_ns), ("backward_ns", format_ns), ("optimizer_ns", format_ns),
                       ("weight_bytes", format_bytes), ("saved_bytes", format_bytes)):  # fmt: skip
        one, other = totals[0][name], totals[1][name]
        ratio = f"B/A {other / one:.3g}" if one else ""
        out.print(f"{name.rsplit('_', 1)[0]:10} {form(one):>14} -> {form(other):>14}  {ratio}")
    correlation = _correlation(pairs)
    if correlation is not None:
        out.print(f"rank correlation of the layers' times: {correlation:.3f}")
    moved = [pair for pair in pairs if pair.differs]
    if not moved:
        out.print("no layer differs")
        return
    by_size = sorted(moved, key=lambda pair: -abs(pair.share_change or 1.0))
    keep = {id(pair) for pair in by_size[: None if every else MOST_ROWS]}
    listed = [pair for pair in moved if id(pair) in keep]
    out.print()
    columns = ("layer", "A ms", "B ms", "B/A", "share", "weights", "saved", "output")
    caption = "share: of all time, B minus A in points; sizes are B minus A"
    table = make_table(*columns, left=("layer",), names=("layer",), space=2, caption=caption)
    for pair in listed:
        table.add_row(*_row(pair))
    print_fitted(out, table)
    if len(listed) < len(moved):
        out.print(f"{len(moved) - len(listed)} more layers differ; --all lists them")


def print_carried(plan: Plan, result: Carried) -> None:
    """Print whether the plan holds: its period before and after, or the rules that it would break."""
    out = console()
    period = evaluate(plan).period_ns
    out.print()
    stages, moved = plan.allocation.stages, result.plan.allocation.stages
    if [stage.stop for stage in moved] != [stage.stop for stage in stages]:
        names = ", ".join(shown(result.plan.chain.layers[stage.start].name) for stage in moved[1:])
        out.print(f"note: B has other layers; its later stages begin with {names}")
    if result.period_ns is not None:
        out.print(
            f"the plan holds for B: period {format_ns(period)} -> {format_ns(result.period_ns)} "
            f"({result.period_ns / period - 1:+.1%}), same stages, same order, within memory"
        )
        bound = result.plan.lower_bounds[0]
        out.print(
            f"no plan for B is shorter than {format_ns(bound.period_ns)} (class {bound_class(bound)}), "
            f"a gap of {gap(result.period_ns, bound):.2%}"
        )
        return
    out.print(Text.assemble(("the plan does not hold for B", "bold"), ":"))
    for sentence in result.violations:
        out.print(f"- {sentence}")
    if result.other_order_ns is not None:
        out.print(f"its stages can run in another order, with fewer in flight, at {format_ns(result.other_order_ns)}")


def _row(pair: LayerPair) -> list[str | Name]:
    names = dict.fromkeys(layer.name for layer in (pair.before, pair.after) if layer is not None)
    title = " = ".join(shown(name, (LAYER_WIDTH - 3) // 2 if len(names) > 1 else LAYER_WIDTH) for name in names)
    times = [f"{time_ns(x) / 1e6:.3f}" if x is not None else "-" for x in (pair.before, pair.after)]
    if pair.before is None or pair.after is None:
        return [Name.of(title), *times, "only in A" if pair.after is None else "only in B", "", "", "", ""]
    ratio, change = pair.time_ratio, pair.share_change
    sizes = [
        (pair.before.weight_bytes, pair.after.weight_bytes),
        cast("tuple[int, int]", pair.saved_bytes),
        (pair.before.output_bytes, pair.after.output_bytes),
    ]
    return [
        Name.of(title),
        *times,
        "" if ratio is None else f"{ratio:.2f}",
        "" if change is None else f"{100 * change:+.2f}",
        *("=" if a == b else f"{'+' if b > a else '-'}{format_bytes(abs(b - a))}" for a, b in sizes),
    ]


def _correlation(pairs: Sequence[LayerPair]) -> float | None:
    both = [(time_ns(x.before), time_ns(x.after)) for x in pairs if x.before is not None and x.after is not None]
    return rank_correlation([a for a, _ in both], [b for _, b in both]) if len(both) > 1 else None


def _totals(chain: Chain) -> dict[str, int]:
    names = ("forward_ns", "backward_ns", "optimizer_ns", "weight_bytes")
    return {name: int(getattr(chain.sums, name)[-1]) for name in names} | {
        "saved_bytes": int(saved_bytes(chain, 0, len(chain)))
    }


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A layer in both profiles, or in one of them; ``indices`` are its places, None where it is missing.

    ``saved_bytes`` is what it keeps for its backward as a stage by itself, ``share_change`` its share of all forward
    and backward time in B minus that in A, None where it is missing in one.
    """

    name: str
    indices: tuple[int | None, int | None]
    before: Layer | None
    after: Layer | None
    saved_bytes: tuple[int | None, int | None]
    share_change: float | None

    def both(self, of: Callable[[Layer], Any]) -> list[Any]:
        """Return what is ``of`` the layer in A and in B, None where it is missing."""
        return [None if x is None else of(x) for x in (self.before, self.after)]

    @property
    def time_ratio(self) -> float | None:
        """Forward and backward time after over before; None when there is nothing to compare."""
        if self.before is None or self.after is None or not time_ns(self.before):
            return None
        return time_ns(self.after) / time_ns(self.before)

    @property
    def differs(self) -> bool:
        """Whether it takes other times or other bytes in B than in A."""
        if self.before is None or self.after is None or self.saved_bytes[0] != self.saved_bytes[1]:
            return True
        one, other = ((time_ns(x), x.weight_bytes, x.output_bytes) for x in (self.before, self.after))
        return one != other


def time_ns(layer: Layer) -> int:
    """Return forward and backward time of one layer."""
    return layer.forward_ns + layer.backward_ns


def paired_layers(one: Chain, other: Chain, by: Match = "name") -> list[LayerPair]:
    """Return the layers of two profiles in order, matched ``by`` what is the same in both."""
    found = []
    for i, j in matched(one, other, by):
        before, after = None if i is None else one.layers[i], None if j is None else other.layers[j]
        kept = None if i is None else int(saved_bytes(one, i, i + 1))
        saved = kept, None if j is None else int(saved_bytes(other, j, j + 1))
        change = None
        if before is not None and after is not None:
            change = time_ns(after) / alone_ns(other) - time_ns(before) / alone_ns(one)
        found.append(LayerPair((before or after or one.layers[0]).name, (i, j), before, after, saved, change))
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; 1 means the same order. At least two values."""
    ranks = []
    for values in (one, other):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        mean: np.ndarray = np.cumsum(counts) - counts / 2
        ranks.append(mean[place])
    return 1.0 if any(np.ptp(r) == 0 for r in ranks) else float(np.corrcoef(ranks)[0, 1])


def comparison(plan: Plan, run: MeasuredRun) -> dict[str, Any]:
    """Return what was planned beside what was measured: the period, operations by kind and stage, and devices.

    Times are in ns, ``ratio`` is measured over planned, None where nothing was planned; the period is None for a short
    run. A backward is without its share of the update on both sides, and passes are without the reading of data and the
    overhead of messages, which are named where they were planned. Activations are the pattern's in the steady state.
    """
    result = evaluate(plan)
    found: list[tuple[str, int, int, int]] = []
    planned_stages = planned_times(plan, result.graph)
    for s, (stage, expected, taken) in enumerate(zip(plan.allocation.stages, planned_stages, run.stages, strict=True)):
        device = plan.platform.slowest(stage.devices)
        timed = plan.chain.timed(device.times)
        step = int(Passes(timed, plan.policy, stage.start, stage.stop, stage.replicas, device.speed).step_ns)
        found += [
            ("F", s, expected.forward_ns, taken.forward_ns),
            ("B", s, expected.backward_ns, taken.backward_ns),
            ("update", s, step, taken.update_ns),
        ]
        beside = {"reading": (expected.data_ns, taken.data_ns), "messages": (expected.exchange_ns, taken.exchange_ns)}
        found += [(kind, s, *both) for kind, both in beside.items() if both[0]]
    for transfer in run.transfers:
        planned = planned_transfer_ns(result.graph, transfer.kind, transfer.stage)
        found.append((f"SEND_{transfer.kind}", transfer.stage, planned, transfer.measured_ns))
    return {
        "period": {
            "planned_ns": result.period_ns,
            "calibrated_ns": run.calibrated_period_ns,
            "measured_ns": run.measured_period_ns,
        },
        "operations": [
            {"kind": kind, "stage": stage, "planned_ns": planned, "measured_ns": measured}
            | {"ratio": round(measured / planned, 4) if planned else None}
            for kind, stage, planned, measured in found
        ],
        "devices": [
            {
                "device": x.device,
                "planned_activation_bytes": result.devices[x.device].activation_bytes,
                "measured_activation_bytes": x.measured_bytes,
            }
            for x in run.devices
        ],
    }


def print_comparison(plan: Plan, run: MeasuredRun, width: int | None = None) -> None:
    """Print :func:`comparison` as tables."""
    found, out = comparison(plan, run), console(width)
    period = found["period"]
    out.print(f"period      {format_ns(period['planned_ns'])} planned")
    if period["measured_ns"] is None or period["calibrated_ns"] is None:
        out.print("            not measured: the run was too short for a steady state")
    else:
        for what, ns in (
            ("predicted with the run's own times", period["calibrated_ns"]),
            ("measured", period["measured_ns"]),
        ):
            out.print(f"            {format_ns(ns)} {what}, {ns / period['planned_ns']:.2f} x planned")
    out.print()
    table = make_table("operation", "stage", "planned", "measured", "ratio", left=("operation",))
    for x in found["operations"]:
        ratio = "-" if x["ratio"] is None else f"{x['ratio']:.2f}"
        table.add_row(x["kind"], str(x["stage"]), format_ns(x["planned_ns"]), format_ns(x["measured_ns"]), ratio)
    print_fitted(out, table)
    out.print()
    for x in found["devices"]:
        out.print(
            f"GPU {x['device']}: activations at most {format_bytes(x['measured_activation_bytes'])} "
            f"measured, {format_bytes(x['planned_activation_bytes'])} planned"
        )
