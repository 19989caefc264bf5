"""Where are the layers of a network while somebody runs them? On a device for their part, with buffers as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..device import place


@contextmanager
def resident(module: nn.Module, device: str, release: bool) -> Iterator[None]:
    """Hold ``module`` on ``device``; with ``release`` only for the time being, so that one layer is there at once.

    What it shares with other modules stays one: it gets its own buffers back, with what became of them.
    """
    home = next((t.device for t in (*module.parameters(), *module.buffers())), None)
    buffers = list(_buffers([module]))
    place_all([module], device)
    try:
        yield
    finally:
        if release and home is not None and home != torch.device(device):
            module.zero_grad(set_to_none=True)
            with torch.no_grad():
                for owner, name, buffer in buffers:
                    buffer.copy_(owner.get_buffer(name))
                    owner._buffers[name] = buffer
            module.to(home)


@contextmanager
def buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let a second run of ``modules`` work on copies of their buffers: batch statistics must count once.

    Plain numbers that they keep as attributes count once, too.
    """
    originals = list(_buffers(modules))
    owners = list(dict.fromkeys(owner for module in dict.fromkeys(modules) for owner in module.modules()))
    numbers = [(owner, {k: x for k, x in vars(owner).items() if type(x) in (bool, int, float)}) for owner in owners]
    copies = {id(buffer): buffer.clone() for _, _, buffer in originals}  # what is one buffer stays one
    for owner, name, buffer in originals:
        owner._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for owner, name, buffer in originals:
            owner._buffers[name] = buffer
        for owner, before in numbers:
            vars(owner).update(before)


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in dict.fromkeys(modules):
        for owner in module.modules():
            yield from ((owner, name, buffer) for name, buffer in owner._buffers.items() if buffer is not None)


def place_all(modules: Sequence[nn.Module], device: str) -> None:
    """Move what is not there yet of ``modules`` to ``device``; what is one weight or one buffer in several stays one.

    Modules of fake tensors, which cannot be moved, are left alone.
    """
    target = torch.device(device)
    if any(t.device != target for module in modules for t in (*module.parameters(), *module.buffers())):
        place(modules, target)
