"""How is a run started on a cluster, and what would every rank do? Told without starting it."""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Sequence
from typing import Final

from ...errors import BadInput
from ...integers import ceil_div
from ...problem import Platform
from ...units import gpu_name
from .instructions import word
from .lowered_run import LoweredRun

PORTS: Final = range(20000, 30000)  # below those that systems give to who asks for any


def torchrun_line(lowered: LoweredRun, arguments: Sequence[str]) -> str:
    """Return the command that starts ``pipeplan`` with ``arguments`` on every node of the plan's platform.

    torchrun numbers equal nodes by itself; those that differ are to be numbered as the platform has them. The port
    follows from the arguments, so that other runs don't meet there.
    """
    nodes, per_node = _nodes(lowered)
    words = _typed(arguments)
    port = PORTS[zlib.crc32(words.encode(errors="surrogateescape")) % len(PORTS)]
    if nodes == 1:
        where = "--standalone"
    elif _differ(lowered.plan.platform):
        where = f"--nnodes={nodes} --node-rank=NODE --master-addr=FIRST_NODE --master-port={port}"
    else:
        where = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:{port}"
    return f"torchrun {where} --nproc-per-node={per_node} -m pipeplan {words}"


def slurm_line(lowered: LoweredRun, arguments: Sequence[str], on_gpus: bool) -> str:
    """Return the line for an ``sbatch`` script that does the same: one torchrun on every node, numbered by Slurm.

    The port follows from the job's number. ``on_gpus`` it asks for them.
    """
    nodes, per_node = _nodes(lowered)
    gpus = f" --gpus-per-node={per_node}" if on_gpus else ""
    srun, words = f"srun --nodes={nodes} --ntasks-per-node=1{gpus}", f"-m pipeplan {_typed(arguments)}"
    if nodes == 1:
        return f"{srun} torchrun --standalone --nproc-per-node={per_node} {words}"
    line = (
        f'torchrun --nnodes={nodes} --node-rank="$SLURM_NODEID" '
        '--master-addr="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" '
        f'--master-port="$(({PORTS[0]} + SLURM_JOB_ID % {len(PORTS)}))" --nproc-per-node={per_node} {words}'
    )
    return f"{srun} --kill-on-bad-exit=1 bash -c {shlex.quote(line)}"


def _nodes(lowered: LoweredRun) -> tuple[int, int]:
    stages = lowered.plan.allocation.stages
    nodes, per_node = nodes_of(lowered.plan.platform, sorted({d for stage in stages for d in stage.members}))
    return nodes, per_node * lowered.plan.chain.tensor


def _differ(platform: Platform) -> bool:
    """Whether nodes have different devices."""
    size = platform.levels[0].count
    return len({platform.devices[first : first + size] for first in range(0, len(platform), size)}) > 1


def _typed(arguments: Sequence[str]) -> str:
    """Return arguments as a shell takes them, with what doesn't print as its UTF-8 bytes in bash's ``$'..'``."""
    return " ".join(shlex.quote(word) if word.isprintable() else _dollar_quoted(word) for word in arguments)


def _dollar_quoted(word: str) -> str:
    def sign_of(sign: str) -> str:
        if sign.isprintable() and sign not in "\\'":
            return sign
        return "".join(f"\\x{byte:02x}" for byte in sign.encode(errors="surrogateescape"))

    return f"$'{''.join(map(sign_of, word))}'"


def nodes_of(platform: Platform, devices: Sequence[int]) -> tuple[int, int]:
    """Return (nodes, processes on each) for ranks that play ``devices`` in order; a node is a lowest-level unit.

    BadInput when nodes would get different numbers of processes, which torchrun doesn't do.
    """
    size = platform.levels[0].count if len(platform.levels) > 1 else len(platform)
    counts = [sum(d // size == node for d in devices) for node in range(ceil_div(len(platform), size))]
    used = {count for count in counts if count}
    if len(used) > 1:
        raise BadInput(
            f"plan: uses {', '.join(map(str, counts))} devices of the platform's nodes; torchrun starts as many "
            "processes on every node"
        )
    return sum(count > 0 for count in counts), used.pop()


def program_lines(lowered: LoweredRun, most: int | None = None) -> list[str]:
    """Return each rank's program in one line, cut after ``most`` instructions.

    ``1F3v2`` is stage 1's forward of microbatch 3 with version 2 of its weights, ``0f3>1`` stage 0's send of its
    output to rank 1, ``0b3<1`` its receive of the gradient, ``0U4`` the update that makes version 4, ``0R4`` the sum
    over replicas before it, ``0+3R4`` that of the weights which stages 0 and 3 share, ``A4`` the agreement of all
    ranks on it, ``S20`` the checkpoint after update 20; ``1B4-7v3`` is one backward of microbatches 4 to 7,
    ``1I4v3`` the first part of one that comes in two, ``1W4v3`` the second, ``1R4v3`` the recomputation for one that
    does none itself. Where gradients are clipped, ``N4`` begins the sum for their norm, and ``0G4`` puts them aside
    until it is known.
    """
    lines = []
    for rank, (device, instructions) in enumerate(zip(lowered.devices, lowered.instructions, strict=True)):
        words = [word(x) for x in instructions[:most]]
        if most is not None and len(instructions) > most:
            words.append(f"... ({len(instructions)} in all)")
        lines.append(f"rank {rank}, {gpu_name(device, lowered.plan.chain.tensor)}: {' '.join(words)}")
    return lines
