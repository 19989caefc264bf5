"""What is this plan, and how good? Its table with the proof of its quality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..check.bounds import PARTS, bounded, proof
from ..check.evaluate import Evaluation, evaluate, gap
from ..check.replica_sums import exposed_sums
from ..check.shared_weights import kept_together
from ..check.targets import TARGETS
from ..cost.memory_model import weights_of
from ..cost.saved import for_weights
from ..cost.stage_graph import StageCost
from ..names import shown
from ..partition.contiguous.grouped import coarseness
from ..partition.contiguous.orders import Orders
from ..plan import Bound, Plan, Stage
from ..problem import Chain, Level, Platform, Policy, Weights
from ..schedule.kinds import kind_of, plan_groups
from ..schedule.pattern import DeviceUse, Group
from ..units import format_bandwidth, format_bytes, format_devices, format_ns
from .looks import Name, console, make_table, print_fitted


def headline(plan: Plan) -> str:
    """Return a plan in one line: period, throughput, bound, gap."""
    result = evaluate(plan)
    bounds = "; ".join(
        f"lower bound {format_ns(b.period_ns)} (class {bound_class(b)}), {distance(b, result.period_ns)}"
        for b in plan.lower_bounds
    )
    idle = idle_devices(plan)
    rest = f"; GPU{'s' if len(idle) > 1 else ''} {format_devices(idle)} idle" if idle else ""
    return f"period {format_ns(result.period_ns)} per microbatch, {throughput(plan, result)}; {bounds}{rest}"


def idle_devices(plan: Plan) -> list[int]:
    """Return the devices of the platform on which a plan has no stage."""
    return sorted(set(range(len(plan.platform))) - {d for stage in plan.allocation.stages for d in stage.devices})


def bound_class(bound: Bound) -> str:
    """Return the class of plans that a bound holds for, in words, and whether it does however rare updates are."""
    if bound.allocation in TARGETS:
        return f"{bound.allocation}{f' under {bound.schedule}' if bound.schedule else ''}, this interval"
    extras = ["replicas"] if bound.replicas else []
    extras += [] if bound.checkpointing == "none" else [f"checkpointing of {bound.checkpointing}"]
    allowed = f" with {' and '.join(extras)}" if extras else ""
    under = f" under {bound.schedule}" if bound.schedule else ""
    order = ", any order" if bound.any_order else ""
    return f"{bound.allocation}{under}{allowed}, {'any' if bound.any_interval else 'this'} interval{order}"


def orders_sentence(plan: Plan, bound: Bound) -> str | None:
    """Return in which orders stages were given unequal devices for ``bound``, in words; None where there is but one."""
    searched = plan.provenance.algorithm in ("auto", "contiguous") and not plan.policy.drains
    if bound.allocation != "contiguous" or not searched:
        return None
    return Orders.of(bounded(plan, bound)).sentence()


def coarse_sentence(plan: Plan) -> str | None:
    """Return what a search among very many GPUs or cuts has left out, in words."""
    searched = plan.provenance.algorithm in ("auto", "contiguous") and not plan.policy.drains and plan.lower_bounds
    return coarseness(bounded(plan, plan.lower_bounds[0])) if searched else None


def layer_order(plan: Plan) -> str | None:
    """Return in which order the layers of a DAG stand, and what that was chosen from, in words; None for the own."""
    about = plan.provenance.options.get("layer_order")
    if not isinstance(about, dict) or not isinstance(about.get("ideals"), int):
        return None if plan.chain.order is None else "in another order than the model's own"
    whose = "in the profile's order" if plan.chain.order is None else "in another order than the model's own"
    which = f"all {about['ideals']} cuts of all" if about.get("all") else f"{about['ideals']} cuts of some"
    return f"{whose}; contiguous stages were tried at {which} orders"


def distance(bound: Bound, period_ns: int) -> str:
    """Return how far a period is above a bound, in words; of a bound that was only claimed, that nobody checked it."""
    return "claimed, not checked" if bound.claimed else f"gap {gap(period_ns, bound):.2%}"


def bound_figures(plan: Plan) -> list[dict[str, Any]]:
    """Return a valid plan's bounds for scripts: class, whether derived here, and if so, how far the plan is above."""
    period = evaluate(plan).period_ns
    return [
        {
            "class": bound.allocation,
            "replicas": bound.replicas,
            "checkpointing": bound.checkpointing,
            "any_interval": bound.any_interval,
            "any_order": bound.any_order,
            "schedule": bound.schedule,
            "period_ns": bound.period_ns,
            "checked": not bound.claimed,
            "gap": None if bound.claimed else gap(period, bound),
        }
        for bound in plan.lower_bounds
    ]


def throughput(plan: Plan, result: Evaluation) -> str:
    """Return microbatches and samples per second."""
    rate = 1e9 / result.period_ns
    text = f"{rate:.2f} microbatches/s"
    return text if plan.chain.microbatch == 1 else f"{text} = {rate * plan.chain.microbatch:.1f} samples/s"


def machine(platform: Platform) -> str:
    """Return what the GPUs are and how they are joined, in words: ``GPUs of 16.00 GB, joined 4 at 12.0 GB/s``."""
    memories = sorted({device.memory_bytes + platform.reserved_bytes for device in platform.devices})
    memory = format_bytes(memories[0]) + (f" to {format_bytes(memories[-1])}" if len(memories) > 1 else "")
    memory += f" less {format_bytes(platform.reserved_bytes)} reserved" if platform.reserved_bytes else ""
    how = ", transfers block" if platform.blocking else ""
    if platform.overhead_ns:
        how += f", messages take {format_ns(platform.overhead_ns)} at each end"
    return f"GPUs of {memory}, joined {' / '.join(map(_joint, platform.levels))}{how}"


def _joint(level: Level) -> str:
    text = f"{level.count} at {format_bandwidth(level.bandwidth)}"
    return text if level.links is None else f"{text} by {level.links} link{'s' if level.links > 1 else ''} each"


def alone_ns(chain: Chain) -> int:
    """Return the time of one microbatch's forward and backward on one GPU, if that had the memory."""
    return int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])


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
    alone = alone_ns(chain)
    out.print(
        Text.assemble(
            (shown(chain.name), "bold"),
            f": {len(chain)} layers, {format_ns(alone)} forward and backward, "
            f"{format_bytes(weights_of(chain, 0, len(chain))[0])} of weights",
        )
    )
    out.print(f"on {len(platform)} {machine(platform)}")
    for assumption in assumptions:
        out.print(f"assumed: {assumption}")
    out.print()
    speedup = alone / result.period_ns
    out.print(
        Text.assemble(
            "period      ",
            (format_ns(result.period_ns), "bold"),
            f" per microbatch, {throughput(plan, result)}, {speedup:.2f} times one GPU",
        )
    )
    if result.makespan_ns is not None:
        out.print(f"mini-batch  {plan.schedule.microbatches} microbatches, drained, in {format_ns(result.makespan_ns)}")
    kind = kind_of(plan)
    if kind.headline is not None:
        name, sentence = kind.headline(plan.schedule)
        out.print(f"{name:<12}{sentence}")
    for bound in plan.lower_bounds:
        optimal = bound.period_ns == result.period_ns and not bound.claimed
        verdict = "optimal" if optimal else distance(bound, result.period_ns)
        out.print(f"bound       {format_ns(bound.period_ns)} for class {bound_class(bound)}: {verdict}")
        if verbose and bound.allocation == "any" and not bound.schedule:
            out.print(f"because     {PARTS[proof(bounded(plan, bound), bound.any_order).part]}")
        orders = orders_sentence(plan, bound)
        if orders is not None:
            out.print(f"devices     {orders}")
    coarse = coarse_sentence(plan)
    if coarse is not None:
        out.print(f"searched    {coarse}")
    chosen = layer_order(plan)
    if chosen is not None:
        out.print(f"layers      {chosen}")
    for line in [*restriction(plan, result), *robustness(plan), *ordering(plan)]:
        out.print(line)
    claimed = plan.provenance.claimed_period_ns
    if claimed is not None and claimed != result.period_ns and plan.pattern and not kind.drains:
        out.print(f"claimed     {format_ns(claimed)} by {shown(plan.provenance.algorithm)} itself, before scheduling")
    out.print(f"weights     {plan.policy.weights}: {MEANING[plan.policy.weights]}; {_state(plan)}")
    out.print(f"update      {updates(plan, result)}")
    others = other_weights(plan, result)
    if others is not None:
        out.print(f"otherwise   {others}")
    idle = idle_devices(plan)
    if idle:
        out.print(f"idle        GPU{'s' if len(idle) > 1 else ''} {format_devices(idle)}, on which there is no stage")
    if plan.allocation.data_parallel:
        out.print("note        this plan is plain data parallelism: one stage on every GPU that it uses")
    tied = kept_together(chain, plan.policy) if len(platform) > 1 else None
    if tied is not None:
        out.print(f"note        {tied}")
    waiting = waited_sums(plan, result)
    if waiting is not None:
        out.print(f"note        {waiting}")
    unknown = unknown_between(chain) if kind.splits else None
    if unknown is not None:
        out.print(f"note        {unknown}")
    status = plan.provenance.solver_status
    if status == "interrupted" or (status == "time limit" and plan.pattern is None):  # else of the integer program
        out.print(f"note        the search ended early: {status}")
    out.print()
    print_fitted(out, _stage_table(plan, result, out.width))


def waited_sums(plan: Plan, result: Evaluation) -> str | None:
    """Return for which sum over replicas updates wait longest, where that is 1% of the period or more."""
    exposed = max(exposed_sums(plan, result), key=lambda x: x.waited_ns, default=None)
    if exposed is None or 100 * exposed.waited_ns < plan.interval * result.period_ns:
        return None
    more = exposed.waited_ns / plan.interval
    text = f"each update of stage {exposed.stage} waits up to {format_ns(exposed.waited_ns)} for its replicas' sum of "
    text += f"{format_ns(exposed.sum_ns)}, {format_ns(more)} for a microbatch, which the period doesn't count"
    if exposed.interval is not None:
        return f"{text}; --accumulate {exposed.interval} leaves passes to hide it"
    if plan.policy.weights == "2bw" and not plan.chain.tied:
        return f"{text}; there is no room for a second gradient"
    return text


def unknown_between(chain: Chain) -> str | None:
    """Return that peaks of schedules that split backwards are too low, where the profile lacks what they hold."""
    if for_weights(chain) is not None:
        return None
    return (
        "peaks leave out gradients that wait between the two parts of a backward, which the profile doesn't know; "
        "profile --split-backward measures them"
    )


def restriction(plan: Plan, result: Evaluation) -> list[str]:
    """Return what a plan was restricted to, and at which price, in lines; nothing where it wasn't."""
    options = plan.provenance.options
    target, price = TARGETS.get(str(options.get("for"))), options.get("price")
    if target is None:
        return []
    lines = [f"for         {target.what}: whole units, equal pipelines, {' or '.join(target.kinds)}"]
    if any(bound.schedule == "interleaved" and bound.period_ns < result.period_ns for bound in plan.lower_bounds):
        lines.append(
            "leaves out  the bound for interleaved: which units stages have beside how many, and waits between them"
        )
    if plan.policy.engine is not None:
        most = max(use.buffer_bytes for use in result.devices)
        lines.append(f"holds       buffers for all microbatches of a step: up to {format_bytes(most)} of a GPU")
    if isinstance(price, dict) and price:
        found = [f"{shown(str(x))} {format_ns(ns)} ({_dearer(ns, result)})" for x, ns in price.items()]
        lines.append(f"price       without that restriction {', '.join(found)}")
    return lines


def robustness(plan: Plan) -> list[str]:
    """Return what a plan takes under drawn durations, and what the one of least period loses then, in lines; nothing of
    plans that were not chosen by that."""
    found = plan.provenance.options.get("robust")
    nominal = found.get("nominal") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(nominal, dict):
        return []
    share, runs, p95 = found.get("jitter"), found.get("runs"), found.get("p95_ns")
    period, other = nominal.get("period_ns"), nominal.get("p95_ns")
    times = [x for x in (runs, found.get("microbatches"), p95, period, other) if isinstance(x, int)]
    if not isinstance(share, float) or len(times) < 5 or min(times) < 1:
        return []
    runs, count, p95, period, other = times
    drawn = f"{runs} runs of {count} microbatches, durations drawn around the planned by {100 * share:.4g}%"
    alone = "nominal     what is chosen by the planned period alone"
    lost = f": {format_ns(period)}, p95 {format_ns(other)}, {other / p95 - 1:.2%} longer" if other > p95 else " is this"
    return [f"robust      p95 {format_ns(p95)} in {drawn}", alone + lost]


def ordering(plan: Plan) -> list[str]:
    """Return how good the order of passes is at least, in a line; nothing of plans whose order no search has found."""
    found = plan.provenance.options.get("order")
    if not isinstance(found, dict):
        return []
    bound, value = found.get("bound_ns"), found.get("value_ns")
    if not isinstance(bound, int) or not isinstance(value, int) or not 0 < bound <= value:
        return []
    gap = "proved best" if bound == value else f"gap {value / bound - 1:.2%}"
    return [f"orders      no other order of these stages drains before {format_ns(bound)}: {gap}"]


def _dearer(period_ns: int, result: Evaluation) -> str:
    """Return in words how much longer the plan's period is than one without its restriction."""
    ratio = result.period_ns / period_ns
    if ratio <= 1:
        return "no shorter than this"
    return f"{ratio:.2f} times longer" if ratio >= 1.1 else f"{ratio - 1:.1%} longer"


MEANING: dict[Weights, str] = {
    "2bw": "two versions of them, gradients one update late, so that the pipeline never drains",
    "stash": "a version for each update that a microbatch in flight misses, never drained",
    "latest": "one version, forward and backward on the newest",
    "flush": "one version, the pipeline drains before every update",
}


def updates(plan: Plan, result: Evaluation) -> str:
    """Return how often weights are updated, in microbatches and samples, and what updating more often would cost."""
    each = plan.chain.microbatch
    text = _every(plan.interval) + ("" if each == 1 else f" = {plan.interval * each} samples")
    for other in plan.provenance.alternatives:
        if other.weights == plan.policy.weights and other.period_ns is not None:
            text += f"; {_every(other.microbatches)}: {longer(other.period_ns, result)} with the same stages"
    return text


def _every(microbatches: int) -> str:
    return "every microbatch" if microbatches == 1 else f"every {microbatches} microbatches"


def other_weights(plan: Plan, result: Evaluation) -> str | None:
    """Return what was found with the same updates of weights that are kept otherwise, or None where nobody looked."""
    found = [
        f"{x.weights} "
        + ("finds no plan" if x.period_ns is None else f"{format_ns(x.period_ns)} ({longer(x.period_ns, result)})")
        + ("" if x.period_ns is None or x.microbatches == plan.interval else f" {_every(x.microbatches)}")
        for x in plan.provenance.alternatives
        if x.weights != plan.policy.weights
    ]
    same = all(
        x.microbatches == plan.interval for x in plan.provenance.alternatives if x.weights != plan.policy.weights
    )
    return f"{', '.join(found)}, by a quick search{' at the same interval' if same else ''}" if found else None


def longer(period_ns: int, result: Evaluation) -> str:
    """Return in words how much longer or shorter a period is than the plan's."""
    ratio = period_ns / result.period_ns
    if max(ratio, 1 / ratio) >= 1.1:
        return f"{ratio:.2f} times longer" if ratio > 1 else f"{1 / ratio:.2f} times shorter"
    return f"{abs(ratio - 1):.1%} {'longer' if ratio >= 1 else 'shorter'}"


def _state(plan: Plan) -> str:
    policy = plan.policy
    return (
        f"{policy.optimizer} in {policy.precision}"
        + _per_parameter(policy)
        + (", state on the host" if policy.offload else "")
        + (", state shared by replicas" if policy.zero else "")
        + ("" if policy.coarsening is None else f", steps overlap with sums of {policy.coarsening} buckets")
        + (", vertical sync" if policy.vertical_sync else "")
        + (", gradients clipped" if policy.clip else "")
    )


def _per_parameter(policy: Policy) -> str:
    size, shared = policy.bytes_per_parameter, policy.shared_bytes_per_parameter
    if size is None:
        return ""
    return f", {size if shared is None else f'{size - shared} + {shared}'} bytes a parameter"


SHORT = 10  # columns of a layer's name where two stand in a cell and there is no room
WIDE_NAME = 24  # and where there is
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
    where = ("stage", "layers", "GPUs")
    column = group_column(plan, result.groups)
    title, places = ((column[0],), column[1]) if column else ((), [])
    table = make_table(
        *where, "forward", "backward", "recom-\nputed", *title, "in\nflight", *parts, "peak", "of",
        left=where, names=("layers",), space=2 if parts else 1, caption=f"times in ms, memory in {unit}",
    )  # fmt: skip
    for s, (stage, cost, use, in_flight, first) in enumerate(stage_figures(plan, result)):
        sizes = [use.weights_bytes, use.activation_bytes, use.buffer_bytes] if parts else []
        memory = [f"{count / size:.2f}" for count in (*sizes, use.peak_bytes)]
        memory.append(
            format_bytes(use.memory_bytes) if use.memory_bytes >= 1000 * size else f"{use.memory_bytes / size:.2f}"
        )
        if first != s:
            memory = [""] * len(parts) + ["see", str(first)]
        table.add_row(
            str(s),
            _layers(plan, stage) if parts else f"{stage.start}-{stage.stop - 1}",
            format_devices(stage.devices),
            f"{cost.forward_ns / 1e6:.2f}",
            f"{cost.backward_ns / 1e6:.2f}",
            _recomputed(stage),
            *places[s : s + 1],
            str(in_flight),
            *memory,
        )
    return table


def _layers(plan: Plan, stage: Stage) -> Name:
    """Return a stage's layers by number and name; names give way together."""
    first, last = (_short(plan.chain.layers[index].name) for index in (stage.start, stage.stop - 1))
    numbers = f"{stage.start}-{stage.stop - 1}"
    if stage.stop - stage.start == 1:
        return Name(
            lambda columns: f"{numbers} {shown(first, columns - len(numbers) - 1)}",
            len(numbers) + 1 + min(len(first), SHORT),
        )

    def cut(columns: int) -> str:
        room = columns - len(numbers) - 3
        each = max(room // 2, room - min(len(first), len(last)))
        return f"{numbers} {shown(first, each)}..{shown(last, each)}"

    return Name(cut, len(numbers) + 3 + min(len(first), SHORT) + min(len(last), SHORT))


def _short(name: str) -> str:
    return shown(name.split("..")[0].split("(")[0], WIDE_NAME)


def _recomputed(stage: Stage) -> str:
    count = sum(stop - start for start, stop in stage.checkpoint)
    if not count:
        return "-"
    return "all" if count == stage.stop - stage.start else f"{count} of {stage.stop - stage.start}"
