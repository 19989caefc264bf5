"""How does one mini-batch of a drained schedule end, and what of it does an evaluation run?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .instructions import Agree, Forward, Instruction, Norm, Receive, Reduce, ReduceTied, Send, Update


def agreed(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule, with all updates at the end, behind one agreement on them."""
    version = next(x.version for x in instructions if isinstance(x, Update))
    return with_updates_last([*instructions, Agree(version)])


def with_updates_last(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule with all updates at the end.

    Sums over replicas stay where they begin, so they go on beside other stages' passes. Updates keep their order, which
    is the same on all ranks.
    """
    return sorted(instructions, key=lambda x: isinstance(x, Update))


def clipped(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule with all sums and then all updates at the end, between them the norm.

    Sums and updates keep their order, which is the same on all ranks.
    """
    updates = [x for x in instructions if isinstance(x, Update)]
    sums = [x for x in instructions if isinstance(x, Reduce)]
    others = [x for x in instructions if not isinstance(x, Reduce | Update)]
    return [*others, *sums, Norm(updates[0].version), *updates]


def with_tied_sums(
    instructions: Sequence[Instruction], tied: Sequence[tuple[int, ...]], own: Sequence[int]
) -> list[Instruction]:
    """Return one mini-batch of a drained schedule on a rank with stages ``own``, sums of ``tied`` weights included.

    A rank that holds any of them makes all its updates at the end, behind the sums, which come in the order of
    ``tied``. The ranks of a device group hold the same stages. So all ranks' lists are parts of one total order: the
    program's, with these sums, and then these updates in their order, after everything else. Nothing deadlocks.
    """
    sums = [stages for stages in tied if set(stages) & set(own)]
    if not sums:
        return list(instructions)
    updates = [x for x in instructions if isinstance(x, Reduce | Norm | Update)]
    others = [x for x in instructions if not isinstance(x, Reduce | Norm | Update)]
    return [*others, *(ReduceTied(stages, updates[0].version) for stages in sums), *updates]


def forwards(instructions: Sequence[Instruction], version: int) -> list[Instruction]:
    """Return the forwards and their exchanges alone, all with ``version``: a run that evaluates."""
    kept: list[Instruction] = []
    for x in instructions:
        match x:
            case Forward():
                kept.append(replace(x, version=version, lent=tuple((s, version) for s, _ in x.lent)))
            case Send("F") | Receive("F"):
                kept.append(x)
    return kept
