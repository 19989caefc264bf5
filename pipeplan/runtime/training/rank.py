"""Who is a rank: what does it play in a run, on which device, with which model?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...plan import Stage
from ..lowering.lowered_run import LoweredRun
from ..model.loaded import LoadedModel, ModelLayer
from .groups import Groups


@dataclass(frozen=True)
class Rank:
    """Rank ``number`` of a ``lowered`` run, on ``device``; the stages of ``model`` that it runs share nothing.

    ``groups`` are those of the whole model's weights that optimizers treat in different ways, None where there is one.
    """

    lowered: LoweredRun
    number: int
    device: torch.device
    model: LoadedModel
    groups: Groups | None = None

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
        """Return torch's parameter groups of the ``masters`` of ``leaves``, weights of stage ``s``."""
        if self.groups is None:
            return None
        names = self.names(s)
        return self.groups.parted([names[leaf] for leaf in leaves], masters)

    def modules(self, s: int) -> list[nn.Module]:
        """Return the modules of stage ``s``."""
        return self.model.modules(self.stage(s))
