"""Who is a rank: what does it play in a run, on which device, with which model, and which weights are stepped how?

Each stage's optimizer has all groups of the whole model, in one order and some of them empty; so what a checkpoint
keeps of them fits any other split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ...plan import Stage
from ..exchange.layer_group import LayerGroup
from ..lowering.lowered_run import LoweredRun
from ..model.build.spec import find
from ..model.loaded import LoadedModel, ModelLayer
from ..model.network import kind_of
from ..model.user_code import user_code
from .update.optimizers import MakeOptimizer


@dataclass(frozen=True)
class Rank:
    """Rank ``number`` of a ``lowered`` run, on ``device``; the stages of ``model`` that it runs share nothing.

    ``groups`` are those of the whole model's weights that optimizers treat in different ways, None where there is one.
    ``together`` are those that run each layer with this process, if any do: they all are this rank.
    """

    lowered: LoweredRun
    number: int
    device: torch.device
    model: LoadedModel
    groups: Groups | None = None
    together: LayerGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether this process tells, and writes, what all that run its layers have."""
        return self.together is None or self.together.place == 0

    @property
    def stages(self) -> list[int]:
        """The stages that it runs, in chain order."""
        return self.lowered.stages_of(self.number)

    @property
    def first_of(self) -> list[int]:
        """The stages whose first replica it is: those that it answers for."""
        return [s for s in self.stages if self.lowered.ranks_of(s)[0] == self.number]

    def stage(self, s: int) -> Stage:
        """Return stage ``s`` of the plan."""
        return self.lowered.plan.allocation.stages[s]

    def layers(self, s: int) -> tuple[ModelLayer, ...]:
        """Return the layers of stage ``s``."""
        return self.model.of(self.stage(s))

    def names(self, s: int) -> dict[nn.Parameter, str]:
        """Return what the weights of stage ``s`` are called in the whole model, where they stand first."""
        found: dict[nn.Parameter, str] = {}
        for layer in self.layers(s):
            for name, parameter in layer.module.named_parameters():
                full = layer.names.get(name)
                if full is not None:
                    found.setdefault(parameter, self.model.first_names.get(full, full))
        return found

    def parted(
        self, s: int, leaves: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]
    ) -> list[dict[str, Any]] | None:
        """Return torch's parameter groups of the ``masters`` of ``leaves``, weights of stage ``s``; None for one."""
        if self.groups is None:
            return None
        names, found = self.names(s), [{**options, "params": list[Any]()} for options in self.groups.options]
        for leaf, master in zip(leaves, masters, strict=True):
            found[self.groups.place[names[leaf]]]["params"].append(master)
        return found

    def modules(self, s: int) -> list[nn.Module]:
        """Return the modules of stage ``s``."""
        return self.model.modules(self.stage(s))


OPTIONS = "parameter groups"


@dataclass(frozen=True)
class Groups:
    """The ``options`` of each group, and by a weight's first name in the whole model the group that it is in."""

    options: tuple[Mapping[str, Any], ...]
    place: Mapping[str, int]


def groups_of(model: LoadedModel, no_decay: Sequence[str], function: str | None) -> Groups | None:
    """Return the groups that are asked for, in one way or the other; None for none."""
    if function is not None:
        return groups_by(model, function)
    return without_decay(model, no_decay) if no_decay else None


def check_decay(words: Sequence[str], make_optimizer: MakeOptimizer) -> None:
    """Raise BadInput where there is no weight decay that some weights could be without."""
    made = make_optimizer([nn.Parameter()])
    if not made.defaults.get("weight_decay"):
        raise BadInput(
            f"no decay: {type(made).__name__} has no weight decay that {', '.join(words)} could be without; say it "
            "with --optimizer, such as AdamW,weight_decay=0.1"
        )


def without_decay(model: LoadedModel, words: Sequence[str]) -> Groups:
    """Return two groups: the second, without weight decay, has the weights in whose name, or module's class, one of
    ``words`` stands, in small letters or large. BadInput for a word that stands in none."""
    found: dict[str, int] = {}
    left = set(words)
    for name, (_, kind) in _weights(model).items():
        text = f"{name} {kind}".lower()
        said = {word for word in words if word.lower() in text}
        found[name], left = int(bool(said)), left - said
    if left:
        raise BadInput(f"no decay: no weight's name, nor its module's class, has {min(left)!r} in it")
    return Groups(({}, {"weight_decay": 0.0}), found)


def groups_by(model: LoadedModel, function: str) -> Groups:
    """Return the groups that ``module:function`` makes of the whole model's named parameters, as torch takes them.

    Each is a dict of ``params`` and options. BadInput unless every trained weight is in one of them.
    """
    weights = _weights(model)
    name_of = {parameter: name for name, (parameter, _) in weights.items()}
    make: Callable[[Any], Any] = find(function)
    with user_code(f"{OPTIONS}: {function}"):
        given = make([(name, parameter) for name, (parameter, _) in weights.items()])
        given = list(given)
    options: list[dict[str, Any]] = []
    place: dict[str, int] = {}
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise BadInput(f"{OPTIONS}: {function} returned {kind_of(group)} as group {index}, not a dict of params")
        params = group["params"]
        for entry in [params] if isinstance(params, Tensor) else params:
            parameter: Any = entry[1] if isinstance(entry, tuple) else entry
            if parameter not in name_of:
                raise BadInput(f"{OPTIONS}: {function} returned something in group {index} that isn't a trained weight")
            if place.setdefault(name_of[parameter], index) != index:
                raise BadInput(f"{OPTIONS}: {function} put {name_of[parameter]} into two groups")
        options.append({key: value for key, value in group.items() if key != "params"})
    for name in weights:
        if name not in place:
            raise BadInput(f"{OPTIONS}: {function} left {name} out; what isn't to be trained has requires_grad False")
    return Groups(tuple(options), place)


def _weights(model: LoadedModel) -> dict[str, tuple[nn.Parameter, str]]:
    """Return every trained weight of the whole model once, by its first name, and the class of the module it is in."""
    found: dict[str, tuple[nn.Parameter, str]] = {}
    for prefix, root in model.roots:
        for path, module in root.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                name = prefix + (f"{path}.{own}" if path else own)
                first = model.first_names.get(name, name)
                if parameter.requires_grad:
                    found.setdefault(first, (parameter, type(module).__name__))
    return found
