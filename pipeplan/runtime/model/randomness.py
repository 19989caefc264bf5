"""How are random numbers made to depend on what is drawn for alone? Torch's, Python's and NumPy's, by a key each."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch

DATA: Final = -1  # in the place of a layer: what a sample is drawn by
ORDER: Final = -2  # the order of a pass over the data, and what its workers begin with
BUILD: Final = -3  # what makes the data


def key_of(seed: int, microbatch: int, layer: int) -> int:
    """Return what ``layer`` (a value that it makes), or DATA, draws by for a microbatch; of ORDER, for a pass."""
    key = blake2b(struct.pack("<3q", seed, microbatch, layer), digest_size=8).digest()
    return int.from_bytes(key, "little", signed=True)


def begin_all(key: int) -> None:
    """Let the random numbers to come on the CPU, of torch, Python and NumPy, be those of ``key``."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)


class OwnRandomness:
    """Random numbers that go on from use to use, beginning with those of a key, and that others know nothing of."""

    def __init__(self, key: int) -> None:
        self._begin = partial(begin_all, key)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context draw them; behind it all is as if nothing had been drawn."""
        others = states()
        self._begin()
        try:
            yield
        finally:
            self._begin = partial(_set, states())
            _set(others)


def states() -> Any:
    """Return how far torch's, Python's and NumPy's random numbers have been drawn on the CPU."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _set(states: Any) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def others() -> Any:
    """Return how far Python's and NumPy's random numbers have been drawn, to be compared."""
    _, python, numpy = states()
    return python, [x.tobytes() if isinstance(x, np.ndarray) else x for x in numpy]
