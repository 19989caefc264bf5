"""Do sums over replicas hide behind passes, as periods count them? Which stages' can; what is waited for.

An asynchronous period leaves room for the load of a stage's sums. But a sum has to be over before the weights made from
it are used: under 2bw that is k + 1 periods after the last gradient's microbatch began its forward, for an update every
k microbatches; with other weights it is at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..cost.memory_model import gradient_bytes
from ..integers import ceil_div
from ..plan import Plan
from ..schedule.kinds import kind_of
from .evaluate import Evaluation, evaluate


def summed_beside(plan: Plan, found: Evaluation | None = None) -> dict[int, int]:
    """Return the stages whose replicas sum gradients while passes go on, with the bytes of the second gradient that
    each takes of what the plan, whose evaluation is ``found``, leaves free.

    Under 2bw an update has a whole round to be made in: there it is those whose GPUs have room for a second gradient,
    which clipping has anyway. Where a batch drains it is those that other stages, or the agreement of all ranks, come
    behind; they need none. Stages of models with shared weights are left alone.
    """
    policy, stages = plan.policy, plan.allocation.stages
    replicated = [s for s, stage in enumerate(stages) if stage.replicas > 1]
    if plan.chain.tied or not replicated or not policy.updates_together:
        return {}
    if policy.drains:
        held = Counter(stage.devices for stage in stages)
        several = [s for s in replicated if policy.precision != "fp32" or held[stages[s].devices] > 1]
        return {} if policy.clip else dict.fromkeys(several, 0)
    if policy.waits_for_norm:
        return dict.fromkeys(replicated, 0)
    found = found or evaluate(plan)
    uses = found.devices
    free = {d: uses[d].memory_bytes - uses[d].peak_bytes for stage in stages for d in stage.devices}
    chosen: dict[int, int] = {}
    for s in replicated:
        cost = found.graph.stages[s]
        size = int(gradient_bytes(policy, cost.weight_bytes, cost.parameters))
        if all(free[d] >= size for d in stages[s].devices):
            chosen[s] = size
            free |= {d: free[d] - size for d in stages[s].devices}
    return chosen


@dataclass(frozen=True, slots=True)
class Exposed:
    """A ``stage`` whose sum of an update takes ``sum_ns``, of which passes hide ``hidden_ns`` at most.

    With an update every ``interval`` microbatches it would be hidden; None: with none.
    """

    stage: int
    sum_ns: int
    hidden_ns: int
    interval: int | None

    @property
    def waited_ns(self) -> int:
        """How long each update waits for it."""
        return self.sum_ns - self.hidden_ns


def exposed_sums(plan: Plan, found: Evaluation) -> Iterator[Exposed]:
    """Yield the stages of an asynchronous ``plan`` whose updates may wait for sums, which its period doesn't count.

    Told from the pattern; a run, where each pass comes as soon as it can, may leave a few periods more.
    """
    if plan.pattern is None or kind_of(plan).drains:
        return
    graph, period = found.graph, plan.pattern.period_ns
    begins = {op.stage: op.start_ns for op in plan.pattern.operations if op.kind == "F"}
    ends = {op.stage: op.start_ns + op.duration_ns for op in plan.pattern.operations if op.kind == "B"}
    beside = summed_beside(plan, found)
    for s, stage in enumerate(plan.allocation.stages):
        sum_ns = graph.stages[s].sync_period_ns * plan.interval
        if stage.replicas == 1 or not sum_ns:
            continue
        inside = ends[s] - begins[s]
        left = max(0, (plan.interval + 1) * period - inside) if s in beside else 0
        if sum_ns > left:
            enough = ceil_div(sum_ns + inside, period) - 1 if s in beside else None
            yield Exposed(s, sum_ns, left, enough)
