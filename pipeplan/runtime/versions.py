"""The weights of one stage in all the versions that are still needed, their gradient, and the optimizer.

A version is a list of parameters of its own, put into the stage's modules before a pass that uses it; autograd keeps
what a forward used, so passes of several versions can be in flight. Parameters of a version share storage with the
optimizer's until an update would overwrite weights that are still needed; then the update works on a copy. Device
memory: needed versions, one gradient, the optimizer's state.

With ``shared`` leaves all versions take turns in one list of parameters instead. Then a backward finds in them the
version that is installed when it runs, not the one that its forward had, provided that autograd keeps no weights of
the forward but looks them up (see ``renewal``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .optimizers import MakeOptimizer, MakeSchedule


class Versions:
    """Weight versions of the trainable parameters of ``modules``; version ``first`` is what they hold now.

    ``uses`` counts the passes that each version will serve: a version that has served them all, and is not the newest,
    gives its storage back for the next one. Tied parameters stay tied. Frozen ones are left alone.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        uses: Counter[int],
        make_optimizer: MakeOptimizer,
        make_schedule: MakeSchedule | None = None,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        slots: dict[tuple[nn.Module, str], int] = {}  # a module may stand in the stage twice
        leaves: list[nn.Parameter] = []
        index: dict[nn.Parameter, int] = {}
        for module in modules:
            for owner in module.modules():
                for name, parameter in owner._parameters.items():
                    if parameter is None or not parameter.requires_grad:
                        continue
                    if parameter not in index:
                        index[parameter] = len(leaves)
                        leaves.append(parameter)
                    slots[owner, name] = index[parameter]
        self._slots = [(owner, name, place) for (owner, name), place in slots.items()]
        self._uses = Counter(uses)
        if shared:  # so that storages tell weights apart
            for leaf in leaves:
                if leaf.untyped_storage().nbytes() != leaf.nbytes:
                    leaf.data = leaf.data.clone()
        self._shared = leaves if shared else None
        self._leaves = {first: [nn.Parameter(leaf.data) for leaf in leaves] if shared else leaves}
        self._newest = self._installed = first
        self._masters = [nn.Parameter(leaf.data) for leaf in leaves]
        self._spare: list[list[Tensor]] = []
        self._gradients: list[Tensor | None] = [None] * len(leaves)
        self._optimizer = make_optimizer(self._masters) if leaves else None
        self._schedule = make_schedule(self._optimizer) if self._optimizer and make_schedule else None
        self.most = 1  # versions that were live at once

    def install(self, version: int) -> None:
        """Put ``version`` into the modules. By assignment, which modules that keep lists of their weights notice."""
        if version == self._installed:
            return
        leaves = self._leaves[version]
        if self._shared is None:
            for owner, name, index in self._slots:
                setattr(owner, name, leaves[index])
        else:
            for shared, leaf in zip(self._shared, leaves, strict=True):
                shared.data = leaf.data
        self._installed = version

    @property
    def installed(self) -> Sequence[nn.Parameter]:
        """The parameters that the modules have now."""
        return self._leaves[self._installed] if self._shared is None else self._shared

    def storages(self) -> set[int]:
        """Return the identities of the storages of all live versions."""
        return {leaf.untyped_storage()._cdata for leaves in self._leaves.values() for leaf in leaves}

    def attach_gradient(self, version: int) -> None:
        """Let backward passes through ``version`` add to the stage's one gradient."""
        for leaf, gradient in zip(self._shared or self._leaves[version], self._gradients, strict=True):
            leaf.grad = gradient

    def detach_gradient(self, version: int) -> None:
        """Take the gradient back from ``version``."""
        for index, leaf in enumerate(self._shared or self._leaves[version]):
            self._gradients[index] = leaf.grad
            leaf.grad = None

    def released(self, version: int) -> None:
        """Count one pass of ``version`` as over."""
        self._uses[version] -= 1
        if not self._uses[version] and version != self._newest:
            self._spare.append([leaf.data for leaf in self._leaves.pop(version)])

    def gradients(self) -> list[Tensor]:
        """Return the accumulated gradient, zeros where no pass has made any, to be summed over replicas in place."""
        for index, gradient in enumerate(self._gradients):
            if gradient is None:
                self._gradients[index] = torch.zeros_like(self._masters[index])
        return [gradient for gradient in self._gradients if gradient is not None]

    def update(self, version: int) -> None:
        """Make ``version`` from the newest one and the gradient, which is gone afterwards."""
        old = self._newest
        needed = self._uses[old] > 0
        if needed:
            spare = self._spare.pop() if self._spare else [torch.empty_like(m.data) for m in self._masters]
            for master, storage in zip(self._masters, spare, strict=True):
                storage.copy_(master.data)
                master.data = storage
        if self._optimizer is not None:
            for master, gradient in zip(self._masters, self._gradients, strict=True):
                master.grad = gradient
            self._optimizer.step()
            if self._schedule is not None:
                self._schedule.step()
            for master in self._masters:
                master.grad = None
        self._gradients = [None] * len(self._masters)
        if needed:
            self._leaves[version] = [nn.Parameter(master.data) for master in self._masters]
        else:
            self._leaves[version] = self._leaves.pop(old)
            self._installed = version if self._installed == old else self._installed
        self._newest = version
        self.most = max(self.most, len(self._leaves))

    def install_newest(self) -> None:
        """Put the newest version into the modules, where the run's result is read."""
        self.install(self._newest)

    def place_of(self, parameter: nn.Parameter) -> int | None:
        """Return the index of a weight of the version that is installed, None for a frozen one."""
        for index, leaf in enumerate(self.installed):
            if leaf is parameter:
                return index
        return None

    def optimizer_state(self, index: int) -> dict[str, Any]:
        """Return what the optimizer remembers of the weight at ``index``, without Nones."""
        state = {} if self._optimizer is None else self._optimizer.state.get(self._masters[index], {})
        return {key: value for key, value in state.items() if value is not None}

    def restore_optimizer(self, index: int, state: Mapping[str, Any]) -> None:
        """Let the optimizer remember ``state`` of the weight at ``index``, next to it; its counter where it counts."""
        if self._optimizer is not None and state:
            master, group = self._masters[index], self._optimizer.param_groups[0]
            counts_there = group.get("capturable") or group.get("fused")
            self._optimizer.state[master] = {
                key: x.to(master.device) if isinstance(x, Tensor) and (key != "step" or counts_there) else x
                for key, x in state.items()
            }

    @property
    def groups(self) -> list[dict[str, Any]] | None:
        """The optimizer's options as they are now, without weights; None for a stage that trains nothing."""
        if self._optimizer is None:
            return None
        return [{key: x for key, x in group.items() if key != "params"} for group in self._optimizer.param_groups]

    @property
    def schedule(self) -> dict[str, Any] | None:
        """The state of the learning-rate schedule, None without one."""
        return None if self._schedule is None else self._schedule.state_dict()

    def restore_rates(self, groups: Sequence[Mapping[str, Any]] | None, schedule: dict[str, Any] | None) -> None:
        """Go on with the options and the schedule of another run's optimizer."""
        if self._optimizer is not None and groups is not None:
            for group, before in zip(self._optimizer.param_groups, groups, strict=True):
                group.update(before)
        if self._schedule is not None and schedule is not None:
            self._schedule.load_state_dict(schedule)
