"""Does a model train as its own code says? A step of it and one of its layers, on the same values, are compared.

Both begin from the same weights, buffers and random numbers. Compared are the loss, the outputs, the gradient of every
weight and input (or that there is none), the buffers after, and how far random numbers were drawn. The operations are
the same, so nearly always all is equal to the bit; where torch chooses another kernel, or adds in another order, values
may differ by :data:`ROUNDINGS` of their type's, relative to the largest entry. Weights stay as they are; buffers,
gradients and random numbers are put back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn

from ....errors import BadInput, PipeplanError
from ...device import random_state
from ..autocast import autocasting
from ..loaded import LOSS_ROOT
from ..network import LOSS, Loss, Network, loss_layer, loss_value, trained_loss
from ..pieces import Piece, pieces_of
from ..places import buffers_kept
from ..randomness import OwnRandomness, others
from ..structure import OF_MODULES, PLAIN, attributes_kept, leaves_of, mapped, tensors_in
from ..user_code import RAISED, code_failed, user_code
from .adapted import no_reentry, run_uncompiled
from .author import GRADIENT, Attributes, Author, Ran, Step, alike, first_difference, named
from .exported import OF_MODULE, refuse_changed

KEY: Final = 20  # of the random numbers that both draw
LOSS_SAID: Final = "the loss"
FIXED: Final = "fixed_python_state"  # what the author of a model sets where it may
ADVICE: Final = "return its layers as an nn.Sequential or a list of modules, which run as they are written"
Back = Callable[[dict[int, Tensor]], dict[int, Tensor]]  # from the gradients behind a piece to those before it


def compare(
    author: Author,
    pieces: Sequence[Piece],
    loss: Loss,
    inputs: Sequence[Tensor],
    target: Any,
    step: Callable[[], Ran] | None = None,
    replicated: Sequence[nn.Module] | None = None,
) -> str:
    """Raise BadInput, with the first difference, unless the layers of ``pieces`` train as the ``author`` does.

    Returned is the name of a buffer that forwards change and the loss depends on, of the modules ``replicated`` (None:
    of all), whose replicas would have each its own; empty without any.
    Pieces run one after the other, or as the ``step`` of a run lets them, which follows no gradient of inputs. All is
    on the device of ``inputs``. Without a step these get values of their own, and so does the ``target``, as an example
    in which two are equal proves nothing; where the author's code takes no such values, they stay as they are.
    CodeFailed where that fails.
    """
    trained = trained_loss(loss)
    if trained is not None:
        author = replace(author, roots=(*author.roots, (LOSS_ROOT, trained)))
    for module in author.modules:
        module.train()
    tries: list[tuple[Sequence[Tensor], Any, bool]] = []
    if step is None:  # messages carry no gradient of inputs, nor do all models take inputs that want one
        own, aim = _own_values((list(inputs), target))
        tries = [(own, aim, True), (own, aim, False)]
    with no_reentry(), run_uncompiled(author.modules), _put_back(author):
        found = ((_tried(author, loss, *values), values) for values in tries)
        plain, (inputs, target, follows) = next((x for x in found if x[0] is not None), (None, (inputs, target, False)))
        if plain is None:
            try:
                plain = _plain(author, loss, inputs, target, follows)
            except RAISED as error:
                if not author.traced and not isinstance(error, PipeplanError):
                    return ""  # as they run for themselves, what fails is said with its layer
                raise code_failed(f"{author.name}: a step of plain training", error) from error
        own = author.modules if replicated is None else replicated
        parted = _parted(author, plain, own, lambda: _plain(author, loss, inputs, target, follows))
        with user_code(f"the layers of {author.name}"):
            by_layers = partial(_by_layers, author, pieces, target) if step is None else lambda _: step()
            # pieces may come to different processes, where each has buffers of its own
            parts = _step(author, [piece.modules for piece in pieces], inputs, follows, by_layers)
    wrong = first_difference(author, plain, parts, pieces)
    if wrong is not None:
        raise BadInput(f"{author.name} would train differently from its own code: {wrong}; {ADVICE}")
    return parted


def apart(network: Network, loss: Loss) -> list[Piece]:
    """Return the layers of ``network``, and ``loss``, each as a piece of its own."""
    layers = enumerate((*network.layers, loss_layer(network, loss)))
    return [piece for i, code in layers for piece in pieces_of(i, [[code]], (), code.makes)]


# --- the values -------------------------------------------------------------------------------------------------------


def _own_values(value: Any) -> Any:
    """Return ``value`` with each tensor's entries in an order of its own; where all are equal they are spread.

    On a GPU, where a wrong index ends the process, whole numbers stay in the columns that they are in.
    """
    generator = torch.Generator().manual_seed(KEY)

    def own(x: Tensor) -> Tensor:
        if x.device.type != "cpu" and x.dim() and not (x.is_floating_point() or x.is_complex()):
            return x.detach()[torch.randperm(len(x), generator=generator).to(x.device)]
        flat = x.detach().reshape(-1)
        made = flat[torch.randperm(len(flat), generator=generator).to(x.device)]
        if len(flat) and bool((flat == flat[0]).all()):
            if x.is_floating_point() or x.is_complex():
                made = flat + torch.rand(len(flat), generator=generator).to(x.device, x.dtype)
            elif x.dtype != torch.bool and int(flat[0]) == 0:
                made = torch.randint(2, (len(flat),), generator=generator).to(x.device, x.dtype)
        return made.reshape(x.shape)

    return mapped(own, value)


def _tried(author: Author, loss: Loss, inputs: Sequence[Tensor], target: Any, follows: bool) -> Step | None:
    """Return a plain step on values that the author's code may not take, None where it takes them not."""
    try:
        step = _plain(author, loss, inputs, target, follows)
    except BadInput:
        raise
    except RAISED:
        return None
    found = step.values[LOSS_SAID]
    return step if found is not None and bool(found.isfinite()) else None


# --- the two steps ----------------------------------------------------------------------------------------------------


def _plain(author: Author, loss: Loss, inputs: Sequence[Tensor], target: Any, follows: bool) -> Step:
    """Return a step of the model as it was written; BadInput where it keeps something that its layers cannot."""

    def run(leaves: Sequence[Tensor]) -> Ran:
        output = author.output([x.clone() for x in leaves])
        value = loss_value(loss, output, target)
        if not value.requires_grad:
            raise BadInput("loss does not depend on anything that can be trained")
        known = {id(x) for x in (*leaves, *(x for _, x, _ in weights))}
        strays.extend(ref(x) for x in leaves_of([value]) if id(x) not in known)
        return value, tensors_in(output), value.backward

    weights = [(name, x, x._version) for name, x in named(author, nn.Module.named_parameters)]
    before = _attributes(author)
    strays: list[ref[Tensor]] = []
    step = _step(author, [author.modules], inputs, follows, run)
    stray = next((x for x in (found() for found in strays) if x is not None), None)  # those of the forward are gone
    if stray is not None:
        raise BadInput(
            f"{author.name} or its loss trains a tensor of shape {tuple(stray.shape)} that neither has as a parameter: "
            "register it; a loss with weights is an nn.Module"
        )
    changed = next((name for name, x, version in weights if x._version != version), None)
    if changed is not None:
        refuse_changed(author.modules[0], changed)
    if author.traced and not getattr(author.modules[0], FIXED, False):
        _refuse_state(author, before, step, lambda: _step(author, [author.modules], inputs, follows, run))
    return step


def _refuse_state(author: Author, before: Attributes, step: Step, again: Callable[[], Step]) -> None:
    """Raise BadInput for random numbers that aren't torch's, and for what Python keeps from forward to forward."""
    sure = f"or set {author.name}.{FIXED} = True if a trace may keep what it is now"
    with OwnRandomness(KEY).installed():
        begun = others()
    for what, then, now in zip(("Python's random", "NumPy"), begun, step.drawn[1:], strict=True):
        if now != then:
            raise BadInput(f"{author.name} draws from {what} in its forward; draw from torch, {sure}")
    kept = _changed(before, step.kept)
    if not kept:
        return
    own = next((name for name in kept if isinstance(step.kept[name][2][0], torch.Generator)), None)
    if own is not None:
        raise BadInput(
            f"{author.name} draws from a generator of its own, {own}, in its forward, and its layers would draw in "
            "another order; draw from torch's own, which run seeds for each microbatch"
        )
    for part, name, (value, _) in step.kept.values():
        vars(part)[name] = value  # as it goes on in plain training
    other = again()
    counts = [x for x in _changed(step.kept, other.kept) if isinstance(other.kept[x][2][0], int | float)]
    if counts or not alike(other.values[LOSS_SAID], step.values[LOSS_SAID], 0.0):
        raise BadInput(
            f"{author.name}.{(counts or kept)[0]} goes from one forward to the next, and a trace keeps what it is now; "
            f"register it as a buffer, {sure}"
        )


def _parted(author: Author, step: Step, replicated: Sequence[nn.Module], again: Callable[[], Step]) -> str:
    """Return a buffer of those ``replicated`` that forwards change and the loss depends on; those of norms don't
    count."""
    before = author.buffers
    own = [(x.removeprefix("buffer "), step.values.get(x)) for x in _buffers(author, replicated, {})]
    changed = {name: x for name, x in own if name in before and x is not None and not torch.equal(x, before[name])}

    def matter(names: Iterable[str]) -> bool:
        kept = {name: before[name].clone() for name in names}
        for name in kept:
            before[name].copy_(changed[name])
        loss = again().values[LOSS_SAID]
        for name, x in kept.items():
            before[name].copy_(x)
        return not alike(loss, step.values[LOSS_SAID], 0.0)

    if not changed or not matter(changed):
        return ""
    return next((name for name in changed if matter([name])), min(changed))


def _by_layers(author: Author, pieces: Sequence[Piece], target: Any, leaves: Sequence[Tensor]) -> Ran:
    """Run the layers, where what each piece reads has come without its graph."""
    values = dict(enumerate(leaves))
    wanted = {v for v, x in values.items() if x.requires_grad}
    backs: list[Back] = []
    outputs: Sequence[Tensor | None] = ()
    for piece in pieces:
        entered = [values[v].detach().requires_grad_(v in wanted) for v in piece.reads]
        if piece.has_loss:
            outputs = [values.get(v) for v in piece.layers[-1].reads]
        made = piece.run(entered, target)
        wanted |= {v for v, x in zip(piece.makes, made, strict=True) if x.requires_grad}
        backs.append(partial(_back, author, piece, entered, made))
        values.update((v, x.detach()) for v, x in zip(piece.makes, made, strict=True))

    def backward() -> None:
        gradients = {LOSS: torch.ones_like(values[LOSS])}
        while backs:
            gradients = backs.pop()(gradients)
        for v, leaf in enumerate(leaves):
            leaf.grad = gradients.get(v) if leaf.requires_grad else None

    return values[LOSS], outputs, backward


def _back(
    author: Author, piece: Piece, entered: Sequence[Tensor], made: Sequence[Tensor], gradients: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return the gradients of values before ``piece`` for those behind it."""
    ends = [(x, gradients.pop(v)) for v, x in zip(piece.makes, made, strict=True) if v in gradients]
    ends = [(x, gradient) for x, gradient in ends if x.requires_grad]
    if ends:
        own = {id(x) for module in piece.modules for x in module.parameters()}
        others = [
            (name, x, x.grad, 0 if x.grad is None else x.grad._version)
            for name, x in named(author, nn.Module.named_parameters)
            if id(x) not in own
        ]
        torch.autograd.backward([x for x, _ in ends], [gradient for _, gradient in ends])
        for name, x, before, version in others:
            if x.grad is not before or (before is not None and before._version != version):
                raise BadInput(
                    f"{piece.layers[0].place} trains {name}, which no module in it has; let the forward that reads it "
                    "give it as an argument"
                )
    for v, x in zip(piece.reads, entered, strict=True):
        if x.grad is not None:
            gradients[v] = gradients[v] + x.grad if v in gradients else x.grad
    return gradients


def _step(
    author: Author,
    parts: Sequence[Sequence[nn.Module]],
    inputs: Sequence[Tensor],
    follows: bool,
    run: Callable[[Sequence[Tensor]], Ran],
) -> Step:
    """Run a step with the modules of ``parts`` at work, each part with buffers of its own, and note what comes of it;
    ``follows``: gradients of inputs too."""
    device, before = inputs[0].device, author.buffers
    leaves = [x.detach().requires_grad_(follows and (x.is_floating_point() or x.is_complex())) for x in inputs]
    gpus = [] if device.type == "cpu" else [device]
    with OwnRandomness(KEY).installed(), torch.random.fork_rng(devices=gpus), ExitStack() as stack:
        if gpus:
            torch.cuda.manual_seed(KEY)
        for modules in parts:
            stack.enter_context(buffers_kept(modules))
        with autocasting(author.autocast, device):
            torch.set_autocast_cache_enabled(author.autocast is None and torch.is_autocast_cache_enabled())
            loss, outputs, backward = run(leaves)
        drawn, kept = (random_state(device), *others()), _attributes(author)
        backward()
        values: dict[str, Tensor | None] = {LOSS_SAID: loss}
        values |= {f"output {i}": x for i, x in enumerate(outputs) if x is not None}
        for name, weight in named(author, nn.Module.named_parameters):
            values[GRADIENT + name], weight.grad = weight.grad, None
        for i, leaf in enumerate(leaves):
            values[f"the gradient of input {i}"], leaf.grad = leaf.grad, None
        values |= _buffers(author, [module for modules in parts for module in modules], before)
    found = {name: None if x is None else x.detach() for name, x in values.items()}
    return Step(found, drawn, kept)


def _buffers(author: Author, modules: Sequence[nn.Module], before: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the buffers of ``author`` as ``modules`` have them, of several copies one that isn't as ``before``."""
    own = {id(module): prefix for prefix, module in author.roots}
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, x in module.named_buffers(remove_duplicate=False):
            place = f"{own[id(module)]}{name}" if id(module) in own else name.removeprefix(OF_MODULE)
            known = f"buffer {place}"
            if known not in found or (place in before and torch.equal(found[known], before[place])):
                found[known] = x
    return found


@contextmanager
def _put_back(author: Author) -> Iterator[None]:
    """Leave the weights of ``author`` with the gradients that they have, and its modules with their attributes."""
    gradients = [(x, x.grad) for _, x in named(author, nn.Module.named_parameters)]
    for weight, _ in gradients:
        weight.grad = None
    try:
        with attributes_kept(part for _, part in named(author, nn.Module.named_modules)):
            yield
    finally:
        for weight, gradient in gradients:
            weight.grad = gradient


def _attributes(author: Author) -> Attributes:
    """Return what the modules keep as attributes of Python, by name, with what shows a change inside."""
    return {
        name: (part, key, (value, _mark(value)))
        for path, part in named(author, nn.Module.named_modules)
        for key, value in vars(part).items()
        if key not in OF_MODULES and (name := f"{path}.{key}".lstrip("."))
    }


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return len(value) if isinstance(value, list | dict | set | deque) else None


def _changed(before: Attributes, now: Attributes) -> list[str]:
    """Return the names of attributes that are others than before."""
    return [name for name, x in now.items() if name not in before or not _is(before[name][2], x[2])]


def _is(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    same = one[0] is other[0] or (type(one[0]) is type(other[0]) and type(one[0]) in PLAIN and one[0] == other[0])
    return same and one[1] == other[1]
