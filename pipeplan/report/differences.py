"""Two profiles side by side as tables and figures, and a plan carried from the one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from rich.markup import escape

from ..check.evaluate import evaluate, gap
from ..cost.saved import saved_bytes
from ..plan import Plan
from ..planner.carry import Carried
from ..problem import Chain, Layer
from ..units import format_bytes, format_ns
from .tables import LAYER_WIDTH, alone_ns, bound_class, console, make_table

MOST_ROWS = 30


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
                "indices": pair.indices,
                "time_ns": [None if x is None else time_ns(x) for x in (pair.before, pair.after)],
                "share_change": _share_change(pair, before, after),
                **{
                    field: [None if x is None else getattr(x, field) for x in (pair.before, pair.after)]
                    for field in ("weight_bytes", "output_bytes")
                },
                "saved_bytes": _saved(pair, before, after),
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
            f"[bold]{label}[/bold] {escape(chain.name)}: {len(chain)} layers, microbatch {chain.microbatch}, "
            f"{escape(chain.dtype)}, {escape(chain.device)}; {escape(chain.source)}"
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
    moved = [pair for pair in pairs if _differs(pair, before, after)]
    if not moved:
        out.print("no layer differs")
        return
    shown = moved
    if not every and len(moved) > MOST_ROWS:
        by_size = sorted(moved, key=lambda pair: -abs(_share_change(pair, before, after) or 1.0))
        keep = {id(pair) for pair in by_size[:MOST_ROWS]}
        shown = [pair for pair in moved if id(pair) in keep]
    out.print()
    columns = ("layer", "A ms", "B ms", "B/A", "share", "weights", "saved", "output")
    caption = "share: of all time, B minus A in points; sizes are B minus A"
    table = make_table(*columns, left=("layer",), space=2, caption=caption)
    table.columns[0].max_width = LAYER_WIDTH
    for pair in shown:
        table.add_row(*_row(pair, before, after))
    out.print(table)
    if len(shown) < len(moved):
        out.print(f"{len(moved) - len(shown)} more layers differ; --all lists them")


def print_carried(plan: Plan, result: Carried) -> None:
    """Print whether the plan holds: its period before and after, or the rules that it would break."""
    out = console()
    period = evaluate(plan).period_ns
    out.print()
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
    out.print("[bold]the plan does not hold for B[/bold]:")
    for sentence in result.violations:
        out.print(f"- {escape(sentence)}")
    if result.other_order_ns is not None:
        out.print(f"its stages can run in another order, with fewer in flight, at {format_ns(result.other_order_ns)}")


def _row(pair: LayerPair, before: Chain, after: Chain) -> list[str]:
    times = [f"{time_ns(x) / 1e6:.3f}" if x is not None else "-" for x in (pair.before, pair.after)]
    if pair.before is None or pair.after is None:
        return [escape(pair.name), *times, "only in A" if pair.after is None else "only in B", "", "", "", ""]
    ratio, change, saved = pair.time_ratio, _share_change(pair, before, after), _saved(pair, before, after)
    sizes = [
        (pair.before.weight_bytes, pair.after.weight_bytes),
        (saved[0] or 0, saved[1] or 0),
        (pair.before.output_bytes, pair.after.output_bytes),
    ]
    return [
        escape(pair.name),
        *times,
        "" if ratio is None else f"{ratio:.2f}",
        "" if change is None else f"{100 * change:+.2f}",
        *("=" if a == b else f"{'+' if b > a else '-'}{format_bytes(abs(b - a))}" for a, b in sizes),
    ]


def _differs(pair: LayerPair, before: Chain, after: Chain) -> bool:
    if pair.before is None or pair.after is None:
        return True
    saved = _saved(pair, before, after)
    sizes = [(x.weight_bytes, x.output_bytes) for x in (pair.before, pair.after)]
    return sizes[0] != sizes[1] or saved[0] != saved[1] or time_ns(pair.before) != time_ns(pair.after)


def _saved(pair: LayerPair, before: Chain, after: Chain) -> list[int | None]:
    return [
        None if index is None else int(saved_bytes(chain, index, index + 1))
        for index, chain in zip(pair.indices, (before, after), strict=True)
    ]


def _share_change(pair: LayerPair, before: Chain, after: Chain) -> float | None:
    """Return the layer's share of all forward and backward time in B minus that in A."""
    if pair.before is None or pair.after is None:
        return None
    shares = [time_ns(x) / alone_ns(chain) for x, chain in ((pair.before, before), (pair.after, after))]
    return shares[1] - shares[0]


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
    """A layer in both profiles, or in one of them; ``indices`` are its places, None where it is missing."""

    name: str
    indices: tuple[int | None, int | None]
    before: Layer | None
    after: Layer | None

    @property
    def time_ratio(self) -> float | None:
        """Forward and backward time after over before; None when there is nothing to compare."""
        if self.before is None or self.after is None or not time_ns(self.before):
            return None
        return time_ns(self.after) / time_ns(self.before)


def time_ns(layer: Layer) -> int:
    """Return forward and backward time of one layer."""
    return layer.forward_ns + layer.backward_ns


def paired_layers(one: Chain, other: Chain) -> list[LayerPair]:
    """Return the layers of two profiles in order, matched by name; where counts agree, renamed ones by place."""
    names = [[layer.name for layer in chain.layers] for chain in (one, other)]
    matcher = SequenceMatcher(a=names[0], b=names[1], autojunk=False)
    pairs = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        together = min(i_end - i, j_end - j) if kind == "equal" or i_end - i == j_end - j else 0
        for k in range(together):
            before, after = one.layers[i + k], other.layers[j + k]
            pairs.append(LayerPair(before.name, (i + k, j + k), before, after))
        pairs += [LayerPair(names[0][k], (k, None), one.layers[k], None) for k in range(i + together, i_end)]
        pairs += [LayerPair(names[1][k], (None, k), None, other.layers[k]) for k in range(j + together, j_end)]
    return pairs


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; 1 means the same order. At least two values."""
    ranks = [_ranks(values) for values in (one, other)]
    means = [sum(r) / len(r) for r in ranks]
    centred = [[x - mean for x in r] for r, mean in zip(ranks, means, strict=True)]
    product = sum(x * y for x, y in zip(*centred, strict=True))
    norm = (sum(x * x for x in centred[0]) * sum(y * y for y in centred[1])) ** 0.5
    return product / norm if norm else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for i in order[start:stop]:
            ranks[i] = (start + stop - 1) / 2
        start = stop
    return ranks
