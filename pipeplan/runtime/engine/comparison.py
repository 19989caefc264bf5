"""Would a run train as the model's own code says? Rank 0 compares its first microbatch before anything is trained.

What is compared is the whole model, on that rank's device (:mod:`.model.compared`), run by what trains the stages of
the plan: with messages between them, recomputation, the backward in its parts, and sums of the gradients of tied
weights. A list of layers is its own code, and was compared for its profile, every cut of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import call
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...cost.saved import saved_bytes
from ...errors import BadInput
from ...problem import CHANGED
from ...units import format_bytes
from ..device import FILL, free_bytes, place, random_state, set_random_state
from ..exchange.layer_group import LayerGroup
from ..lowering.lowered_run import LoweredRun
from ..measure.recorder import HeldBytes
from ..model.autocast import Autocast
from ..model.build.fitting import fitted
from ..model.build.loading import OwnPart
from ..model.contract import Span, sample_of
from ..model.loaded import LOSS_ROOT, LoadedModel, constants_of
from ..model.network import Loss, own_loss
from ..model.pieces import Piece
from ..model.structure import converted, mapped, own_memory, tensors_in, tensors_of
from ..model.trace.author import Author, Ran
from ..model.trace.compared import compare
from ..model.user_code import user_code
from ..training.half import halved
from ..training.rank import Rank
from ..training.repeatable import Draws
from ..training.split_stage import SplitStage
from ..training.update.update import ties_of
from ..training.weights.gradients import Gradients
from ..training.weights.versions import Versions
from .job import Job
from .own_stages import runner_of
from .reading import reads_of

COPIES: Final = 3  # of weights: themselves and the gradients of both steps


class _InOneRow(Draws):
    """Random numbers as plain training draws them, one after another; what is recomputed draws the same again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)
        self._begun: dict[Piece, Tensor] = {}

    def run(self, piece: Piece, microbatch: int, entered: Sequence[Tensor], target: Any) -> list[Tensor]:
        now = random_state(self._device)
        again = piece in self._begun
        set_random_state(self._begun.setdefault(piece, now), self._device)
        made = piece.run(entered, target)
        if again:
            set_random_state(now, self._device)
        return made


def compare_stages(
    author: Author,
    lowered: LoweredRun,
    model: LoadedModel,
    device: torch.device,
    given: Sequence[Tensor],
    inputs: Sequence[Tensor],
    target: Any,
    joined: Callable[[], None] | None = None,
    loss: Loss | None = None,
) -> str:
    """Compare ``model``, which is whole and takes ``inputs``, in the stages of a run with its ``author``'s, which is
    ``given`` the like; return what :func:`compare` does of the stages that have replicas.

    Where ``model`` is one rank's part of what the author's has, with another ``loss``, its gradients are ``joined`` to
    those of the author's weights."""
    stages = lowered.plan.allocation.stages
    pieces = [piece for stage in stages for piece in model.pieces(stage)]
    replicated = [module for stage in stages if stage.replicas > 1 for module in model.modules(stage)]
    step = partial(_one_step, lowered, model, device, inputs, target)

    def whole() -> Ran:
        value, outputs, backward = step()

        def backwards() -> None:
            backward()
            if joined is not None:
                joined()

        return value, outputs, backwards

    return compare(author, pieces, loss or model.loss, given, target, whole, replicated)


def _one_step(
    lowered: LoweredRun, model: LoadedModel, device: torch.device, inputs: Sequence[Tensor], target: Any
) -> Ran:
    """Run a microbatch forward through all stages of ``model``, which is whole, and return what :func:`compare` takes.

    The backward leaves the sum of each weight's gradients with it, of those stages whose copies are summed in a run.
    """
    rank, draws = Rank(lowered, 0, device, model), _InOneRow(device)
    stages = range(len(lowered.plan.allocation.stages))
    tied = {tie.copy_in(tie.stages[0], model) for tie in ties_of(lowered, model)}
    gradients = [Gradients(Versions(rank.modules(s), shared=lowered.reads_newest)) for s in stages]
    runners = [runner_of(rank, s, draws, gradients[s], HeldBytes(), call, model) for s in stages]
    message: Any = None
    for runner in runners:
        message = runner.forward(0, 0, message, target if runner.takes_targets else None, False, inputs=inputs)
        runner.scale_loss(lowered.interval)  # as if it were the only microbatch of an update

    def backwards() -> None:
        back: Tensor | None = None
        for runner in reversed(runners):
            backward = runner.backward_inputs if isinstance(runner, SplitStage) else runner.backward
            back = backward(0, 0, back)
        for runner in runners:
            if isinstance(runner, SplitStage):
                runner.backward_weights(0, 0)
        places: dict[nn.Parameter, dict[int, Tensor | None]] = {}
        for s, found in enumerate(gradients):
            for weight, gradient in zip(found.versions.installed, found.due, strict=True):
                places.setdefault(weight, {})[s] = gradient
        for weight, own in places.items():
            summed = weight in tied or len(lowered.homes(own)) == 1
            copies = [x for x in own.values() if x is not None][: None if summed else 1]
            weight.grad = sum(copies[1:], copies[0]) if copies else None

    return message, (), backwards


def compared(
    job: Job,
    lowered: LoweredRun,
    model: LoadedModel,
    device: torch.device,
    half: torch.dtype | None,
    autocast: Autocast | None,
    together: LayerGroup | None = None,
) -> LoadedModel:
    """Return ``model``, fitted to its plan, with a note that says that it was compared, or why not; all that run its
    layers ``together`` with this process compare at once, each its part with the whole.

    BadInput names the first difference.
    """
    begun, chain, copies = time.perf_counter(), lowered.chain_of(lowered.widest), COPIES
    if together is not None:
        copies *= 1 + chain.tensor
    needed = copies * sum(layer.weight_bytes for layer in chain.layers) + int(saved_bytes(chain, 0, len(chain)))
    free = free_bytes(str(device))
    if needed > FILL * free:
        return _noted(model, f"takes {format_bytes(needed)} in one process, and {format_bytes(free)} are free")
    about = chain.microbatch, job.options.seed, device
    build = partial(OwnPart, small=sys.maxsize, dtype=half, autocast=autocast)
    whole = model
    if half is not None or _lacks_values(model):
        whole = fitted(build(job.model, *about).load(), chain)
    plain = whole if together is None else build(job.model.whole, *about).load()
    if _lacks_values(whole) or _lacks_values(plain):
        return _noted(model, "has weights without values, which come from a file")
    for one in (whole, plain) if together is not None else (whole,):
        modules = [*(root for _, root in one.roots), *(layer.module for layer in one.layers)]
        if half is not None:
            converted(nn.ModuleList(modules), half, constants_of(one))
        place(modules, device)
    if half is not None and whole.chain:
        whole, _ = halved(whole, half, (), device)
    first = lowered.first.microbatch
    with user_code("data"):
        given = next(reads_of(whole.data.source, Span(job.options.seed, first, first + 1, job.options.epoch))).given
    x, target = sample_of(given, None if whole.loss is own_loss else whole.loss, whole.inputs)
    x = mapped(lambda tensor: _at(tensor, device, half), x)
    target = mapped(lambda tensor: _at(tensor, device, None), target)
    inputs = [tensor.to(device) for tensor in whole.data.enter(first, given)[0]]
    roots = [(prefix, root) for prefix, root in plain.roots if prefix != LOSS_ROOT]
    author = Author.of(roots[0][1], x, whole.loss is own_loss, autocast)
    if whole.chain:
        author = Author.of_layers(roots, autocast)
    joined = None if together is None else partial(_joined, whole, plain, together)
    changed = compare_stages(author, lowered, whole, device, tensors_in(x), inputs, target, joined, plain.loss)
    if changed:
        raise BadInput(f"{CHANGED.format(name=author.name, buffer=changed)}; plan with --no-replicas")
    seconds = time.perf_counter() - begun
    return replace(model, compared=f"the first microbatch trains as in plain torch: compared in {seconds:.2g} s")


def _joined(part: LoadedModel, whole: LoadedModel, together: LayerGroup) -> None:
    """Give the weights of ``whole`` the gradients that all those ``together`` have for their parts of it."""
    own = {p + name: x for p, root in part.roots for name, x in root.named_parameters(remove_duplicate=False)}
    weights = {x: p + name for p, root in whole.roots for name, x in root.named_parameters()}  # tied ones once
    for weight, name in weights.items():
        mine, shard = own[name], part.shards.get(name)
        found, mine.grad = mine.grad, None
        weight.grad = found if found is None or shard is None else together.whole(found, shard.whole).to(found)


def _noted(model: LoadedModel, why: str) -> LoadedModel:
    return replace(model, compared=f"the model wasn't compared with plain training: it {why}")


def _lacks_values(model: LoadedModel) -> bool:
    modules = [*(layer.module for layer in model.layers), *(root for _, root in model.roots)]
    return any(isinstance(x, FakeTensor) for x in tensors_of(modules))


def _at(x: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Return a copy on ``device``, which a forward may change."""
    return own_memory(x.to(device, dtype if x.is_floating_point() else None))
