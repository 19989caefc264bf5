"""Would a run train as the model's own code says? Rank 0 compares its first microbatch before anything is trained.

What is compared is the whole model, on that rank's device, in the stages of the plan and with the messages between them
(:mod:`.model.compared`). A list of layers is its own code, and was compared for its profile, every cut of it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...cost.saved import saved_bytes
from ...errors import BadInput
from ...problem import CHANGED
from ...units import format_bytes
from ..data.loader import Span
from ..device import FILL, free_bytes, place
from ..model.autocast import Autocast
from ..model.build.fitting import fitted
from ..model.build.loading import OwnPart
from ..model.contract import Data, sample_of
from ..model.loaded import LoadedModel, constants_of
from ..model.network import own_loss
from ..model.structure import converted, mapped, own_memory, tensors_in, tensors_of
from ..model.trace.compared import Author, Stages, compare
from ..model.user_code import user_code
from .job import Job
from .reading import reads_of

COPIES: Final = 3  # of weights: themselves and the gradients of both steps


def compared(
    job: Job, model: LoadedModel, device: torch.device, half: torch.dtype | None, autocast: Autocast | None
) -> LoadedModel:
    """Return ``model``, fitted to its plan, with a note that says that it was compared, or why not.

    BadInput names the first difference.
    """
    begun, chain = time.perf_counter(), job.plan.chain
    needed = COPIES * sum(layer.weight_bytes for layer in chain.layers) + int(saved_bytes(chain, 0, len(chain)))
    free = free_bytes(str(device))
    if needed > FILL * free:
        return _noted(model, f"takes {format_bytes(needed)} in one process, and {format_bytes(free)} are free")
    whole = model
    if half is not None or _lacks_values(model):
        part = OwnPart(
            job.model, chain.microbatch, job.options.seed, device, sys.maxsize, dtype=half, autocast=autocast
        )
        whole = fitted(part.load(), chain)
        if _lacks_values(whole):
            return _noted(model, "has weights without values, which come from a file")
    module = whole.roots[0][1]
    modules = [*(root for _, root in whole.roots), *(layer.module for layer in whole.layers)]
    if half is not None:
        converted(nn.ModuleList(modules), half, constants_of(whole))
    place(modules, device)
    given = _first(job, whole.data.source)
    stages: Stages = [
        (whole.pieces(s), None if s.stop == len(chain) else whole.cut(s.stop)) for s in job.plan.allocation.stages
    ]
    x, target = sample_of(given, None if whole.loss is own_loss else whole.loss)
    x = mapped(lambda tensor: _at(tensor, device, half), x)
    target = mapped(lambda tensor: _at(tensor, device, None), target)
    inputs, _ = whole.data.enter(job.lowered().first.microbatch, given)
    entering = whole.entering([tensor.to(device) for tensor in inputs])
    author = Author.of(module, x, whole.loss is own_loss, autocast)
    replicated = [m for s in job.plan.allocation.stages if s.replicas > 1 for m in whole.modules(s)]
    changed = compare(author, stages, whole.loss, tensors_in(x), target, entering, replicated)
    if changed:
        raise BadInput(f"{CHANGED.format(name=author.name, buffer=changed)}; plan with --no-replicas")
    seconds = time.perf_counter() - begun
    return replace(model, compared=f"the first microbatch trains as in plain torch: compared in {seconds:.2g} s")


def _noted(model: LoadedModel, why: str) -> LoadedModel:
    return replace(model, compared=f"the model wasn't compared with plain training: it {why}")


def _lacks_values(model: LoadedModel) -> bool:
    modules = [*(layer.module for layer in model.layers), *(root for _, root in model.roots)]
    return any(isinstance(x, FakeTensor) for x in tensors_of(modules))


def _at(x: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Return a copy on ``device``, which a forward may change."""
    return own_memory(x.to(device, dtype if x.is_floating_point() else None))


def _first(job: Job, source: Data) -> Any:
    """Return what ``source`` gives for the first microbatch."""
    options, first = job.options, job.lowered().first.microbatch
    with user_code("data"):
        return next(reads_of(source, Span(options.seed, first, first + 1, options.epoch))).given
