"""A valid plan with one thing changed, and what the validator then says."""

from dataclasses import replace

from cases.plans import graph_of

from pipeplan.check.validate import violations
from pipeplan.plan import Allocation
from pipeplan.schedule.pattern import make_pattern


def with_stages(plan, *stages):
    return replace(plan, allocation=Allocation(tuple(stages)))


def with_stage(plan, s, **changes):
    stages = list(plan.allocation.stages)
    stages[s] = replace(stages[s], **changes)
    return with_stages(plan, *stages)


def with_op(plan, i, **changes):
    operations = list(plan.pattern.operations)
    operations[i] = replace(operations[i], **changes)
    return replace(plan, pattern=replace(plan.pattern, operations=tuple(operations)))


def with_starts(plan, starts, period=None):
    pattern = make_pattern(graph_of(plan), starts, period or plan.pattern.period_ns)
    return replace(plan, pattern=pattern)


def with_policy(plan, **changes):
    return replace(plan, policy=replace(plan.policy, **changes))


def with_memory(plan, device, memory):
    devices = list(plan.platform.devices)
    devices[device] = replace(devices[device], memory_bytes=memory)
    return replace(plan, platform=replace(plan.platform, devices=tuple(devices)))


def only(plan, *words):
    """The plan has exactly one violation, and its sentence names all of ``words``."""
    found = violations(plan)
    assert len(found) == 1, found
    for word in words:
        assert str(word) in found[0], (word, found[0])
