"""Jitter: random durations around the planned ones, to see which schedules stand unsteady machines."""

from __future__ import annotations

import numpy as np

from .program import Program
from .simulate import Times


def jittered_ns(program: Program, share: float, seed: int) -> Times:
    """Return durations, ``[microbatch][position]`` in ns, each the planned one times 1 + ``share`` * N(0, 1).

    Independent for every step, never negative, and the same for the same seed.
    """
    planned = np.array([work.duration_ns for work in program.operations], dtype=np.float64)
    noise = np.random.default_rng(seed).standard_normal((program.microbatches, len(planned)))
    drawn = np.rint(planned * np.maximum(0.0, 1.0 + share * noise)).astype(np.int64)
    return tuple(map(tuple, drawn.tolist()))
