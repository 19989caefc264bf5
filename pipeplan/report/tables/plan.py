"""What is this plan? Its table of stages, under what there is to say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from ...check.bounds import PARTS, bounded, proof
from ...check.evaluate import Evaluation, evaluate
from ...check.lateness import plan_delays
from ...check.validate import kept_together
from ...cost.memory_model import weights_of
from ...cost.stage_cost import StageCost
from ...files.plans import gpus_of
from ...names import format_devices, shown
from ...plan import Bound, Plan, Stage
from ...problem import WEIGHTS, Chain
from ...schedule.kinds import kind_of, plan_groups
from ...schedule.pattern import DeviceUse, Group
from ...units import format_bytes, format_ns
from .. import words
from ..looks import Name, console, make_table, print_fitted
from ..searched import moves, ordering, restriction, tensor_degree, undecided


def headline(plan: Plan) -> str:
    """Return a plan in one line: period, throughput, bound, gap."""
    result = evaluate(plan)
    bounds = "; ".join(
        f"lower bound {format_ns(b.period_ns)} (class {words.bound_class(b)}), {words.distance(b, result.period_ns)}"
        for b in plan.lower_bounds
    )
    late = words.mean_delay(plan_delays(plan, result.graph))
    delay = f", gradients late by {late}" if late else ""
    idle = words.idle_devices(plan)
    rest = f"; GPU{'s' if len(idle) > 1 else ''} {format_devices(idle)} idle" if idle else ""
    return (
        f"period {format_ns(result.period_ns)} per microbatch, {words.throughput(plan, result)}{delay}; {bounds}{rest}"
    )


def print_plan(
    plan: Plan,
    assumptions: Sequence[str] = (),
    width: int | None = None,
    result: Evaluation | None = None,
    verbose: bool = False,
) -> None:
    """Print a plan: what was asked, period and throughput, bounds and gaps, and one row per stage.

    ``result`` is its evaluation, computed where it isn't given. ``verbose``: also what the bound on all plans follows
    from.
    """
    out = console(width)
    result = result or evaluate(plan)
    chain, platform = plan.chain, plan.platform
    alone = words.alone_ns(chain)
    out.print(
        Text.assemble(
            (shown(chain.name), "bold"),
            f": {len(chain)} layers, {format_ns(alone)} forward and backward, "
            f"{format_bytes(weights_of(chain, 0, len(chain))[0])} of weights",
        )
    )
    out.print(f"on {len(platform.whole or platform)} {words.machine(platform.whole or platform)}")
    for line in tensor_degree(plan):
        out.print(line)
    for line in words.assumed(assumptions):
        out.print(line)
    out.print()
    for line in words.data_parallelism(plan, result):
        out.print(line)
    speedup = platform.width * alone / result.period_ns
    out.print(
        Text.assemble(
            "period      ",
            (format_ns(result.period_ns), "bold"),
            f" per microbatch, {words.throughput(plan, result)}, {speedup:.2f} times one GPU",
        )
    )
    for line in _lines(plan, result, verbose):
        out.print(line)
    out.print()
    print_fitted(out, _stage_table(plan, result, out.width))


def _lines(plan: Plan, result: Evaluation, verbose: bool) -> Iterator[str]:
    """Yield what there is to say of a plan behind its period."""
    kind = kind_of(plan)
    yield from _titled("estimated", words.estimated(plan, result))
    yield from _titled("undecided", undecided(plan, result))
    if result.makespan_ns is not None:
        yield f"mini-batch  {plan.schedule.microbatches} microbatches, drained, in {format_ns(result.makespan_ns)}"
    if kind.headline is not None:
        yield from _titled(*kind.headline(plan.schedule))
    for bound in plan.lower_bounds:
        yield from _bound_lines(plan, result, bound, verbose)
    yield from _titled("searched", words.coarse_sentence(plan))
    yield from _titled("layers", words.layer_order(plan))
    yield from _titled("shared", words.sharing(plan))
    yield from (*restriction(plan, result), *ordering(plan))
    yield from _titled("moves", moves(plan, result))
    claimed = plan.provenance.claimed_period_ns
    if claimed is not None and claimed != result.period_ns and plan.pattern and not kind.drains:
        yield f"claimed     {format_ns(claimed)} by {shown(plan.provenance.algorithm)} itself, before scheduling"
    yield f"weights     {plan.policy.weights}: {WEIGHTS[plan.policy.weights].meaning}; {words.state(plan)}"
    late = words.late_gradients(plan, result)
    yield from _titled("late", late)
    yield from _titled("asks", late and ASKED)
    yield f"update      {words.updates(plan, result)}"
    yield from _titled("otherwise", words.other_weights(plan, result))
    idle = words.idle_devices(plan)
    if idle:
        yield f"idle        {f'GPUs {format_devices(idle)} have' if len(idle) > 1 else f'GPU {idle[0]} has'} no stage"
    yield from _titled("note", kept_together(plan.chain, plan.policy) if len(plan.platform) > 1 else None)
    yield from _titled("note", words.waited_data(plan, result))
    yield from _titled("note", words.unknown_between(plan.chain) if kind.splits else None)
    status = plan.provenance.solver_status
    if status == "interrupted" or (status == "time limit" and plan.pattern is None):  # else of the integer program
        yield f"note        the search ended early: {status}"


def _bound_lines(plan: Plan, result: Evaluation, bound: Bound, verbose: bool) -> Iterator[str]:
    optimal = bound.period_ns == result.period_ns and not bound.claimed
    verdict = "optimal" if optimal else words.distance(bound, result.period_ns)
    yield f"bound       {format_ns(bound.period_ns)} for class {words.bound_class(bound)}: {verdict}"
    if verbose and bound.allocation == "any" and not bound.schedule:
        yield f"because     {PARTS[proof(bounded(plan, bound), bound.period_ns).part]}"
    yield from _titled("devices", words.orders_sentence(plan, bound))


def _titled(title: str, sentence: str | None) -> list[str]:
    """Return a line, or none where there is nothing to say."""
    return [] if sentence is None else [f"{title:<12}{sentence}"]


ASKED = "a learning rate below the highest that trains; run corrects momentum, and run --against flush compares"
LAYERS_WIDTH = 60  # columns of a stage's first and last layer, at most
SHORT = 10  # fewer columns say nothing of a name
NARROW = 112  # columns below which the table leaves out what the peak is made of


def stage_figures(plan: Plan, result: Evaluation) -> Iterator[tuple[Stage, StageCost, DeviceUse, int, int]]:
    """Yield each stage, its cost, what its device holds, its microbatches in flight, and the first stage on the device.

    What the device holds is said once, at that first stage.
    """
    for s, stage in enumerate(plan.allocation.stages):
        cost, use = result.graph.stages[s], result.devices[stage.devices[0]]
        together = result.graph.stages_on(cost.resource)
        yield stage, cost, use, use.in_flight[together.index(s)], together[0]


def group_column(plan: Plan, groups: Sequence[Group]) -> tuple[str, list[str]] | None:
    """Return the title of the column that says where the pattern puts each stage, and its cells; None without groups.

    Contiguous stages have their group; of others the groups say less than the index shifts of forward and backward.
    """
    places = [group for group in groups if group.kind == "F"]
    if not places:
        return None
    if plan.allocation.contiguous:
        return "group", [str(place.number) for place in places]
    return "shifts", [",".join(map(str, place.shifts)) for place in places]


def groups_line(plan: Plan) -> str | None:
    """Return the groups of a plan's stages in one line, or the index shifts that stand for them; None without any."""
    column = group_column(plan, plan_groups(plan))
    if column is None:
        return None
    title, cells = column
    if title == "shifts":
        return f"index shifts of F,B by stage: {' '.join(cells)}"
    members = {cell: [s for s, other in enumerate(cells) if other == cell] for cell in reversed(cells)}
    return f"groups of stages, from the loss back: {'; '.join(f'{n}: {format_devices(x)}' for n, x in members.items())}"


def _stage_table(plan: Plan, result: Evaluation, width: int) -> Table:
    parts = ("weights", "activa-\ntions", "buffers") if width >= NARROW else ()
    unit, size = ("GB", 10**9) if max(use.peak_bytes for use in result.devices) >= 10**9 else ("MB", 10**6)
    parted = max(stage.tensor for stage in plan.allocation.stages) > 1
    where = ("stage", "layers", "GPUs", *(("tensor",) if parted else ()))
    column = group_column(plan, result.groups)
    title, places = ((column[0],), column[1]) if column else ((), [])
    limits = [_memory(use, size) for _, _, use, _, _ in stage_figures(plan, result)]
    same = len(set(limits)) == 1
    alike = f", of {limits[0]}{'' if limits[0].endswith('B') else f' {unit}'} on each GPU" if same else ""
    limit = () if same else ("of",)
    table = make_table(
        *where, "forward", "backward", "recom-\nputed", *title, "in\nflight", *parts, "peak", *limit,
        left=where, names=("layers",), space=2 if parts else 1, caption=f"times in ms, memory in {unit}{alike}",
    )  # fmt: skip
    names = short_names(plan.chain)
    for s, (stage, cost, use, in_flight, first) in enumerate(stage_figures(plan, result)):
        sizes = [use.weights_bytes, use.activation_bytes, use.buffer_bytes] if parts else []
        memory = [f"{count / size:.2f}" for count in (*sizes, use.peak_bytes)]
        if first != s:
            memory = [""] * len(parts) + [f"see {first}"]
        table.add_row(
            str(s),
            _layers(names, stage),
            format_devices(gpus_of(plan.platform, stage)),
            *((str(stage.tensor),) if parted else ()),
            f"{cost.forward_ns / 1e6:.2f}",
            f"{cost.backward_ns / 1e6:.2f}",
            _recomputed(stage),
            *places[s : s + 1],
            str(in_flight),
            *memory,
            *(() if same else (limits[s] if first == s else "",)),
        )
    return table


def _memory(use: DeviceUse, size: int) -> str:
    return format_bytes(use.memory_bytes) if use.memory_bytes >= 1000 * size else f"{use.memory_bytes / size:.2f}"


def short_names(chain: Chain) -> list[str]:
    """Return the layers' names without what stands before their lists, or before the last dot where they are in none.

    ``transformer.h.3.attn`` is ``h.3.attn`` and ``transformer.wte`` ``wte``; names that would be alike stay whole.
    """
    whole = [layer.name.split("..")[0].split("(")[0] for layer in chain.layers]
    short = []
    for name in whole:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
        short.append(".".join(parts[max(0, number - 1) :]))
    times = Counter(short)
    return [one if times[one] == 1 else name for one, name in zip(short, whole, strict=True)]


def _layers(names: Sequence[str], stage: Stage) -> Name:
    """Return a stage's layers by number and name; where there is less room names end at an earlier dot, or are gone."""
    numbers = f"{stage.start}-{stage.stop - 1}"
    first, last = names[stage.start].split("."), names[stage.stop - 1].split(".")
    least = 1 + any(part.isdigit() for name in (first, last) for part in name[1:2])  # an item has its number
    depths = range(max(len(first), len(last)), least - 1, -1)
    several = stage.stop - stage.start > 1
    texts = [".".join(first[:n]) + (f"..{'.'.join(last[:n])}" if several else "") for n in depths]

    def cut(columns: int) -> str:
        room = min(columns, LAYERS_WIDTH) - len(numbers) - 1
        fitting = next((text for text in texts if len(text) <= room), shown(texts[-1], room) if room >= SHORT else "")
        return f"{numbers} {fitting}".rstrip()

    return Name(cut, len(numbers))


def _recomputed(stage: Stage) -> str:
    count = sum(stop - start for start, stop in stage.checkpoint)
    if not count:
        return "-"
    return "all" if count == stage.stop - stage.start else f"{count} of {stage.stop - stage.start}"
