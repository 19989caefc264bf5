"""How is one stage updated, with weights that it shares with others? From summed, scaled and clipped gradients.

Of weights that stages share each device has one copy, and equal gradients keep the copies equal. What stages of one
rank share the first of them keeps (:mod:`..weights.versions`). Before an update the gradients of all copies are added
up over the ranks, and each copy gets the sum. The copies begin equal, and their optimizers do the same with the same
numbers. Where the pipeline doesn't drain (2bw), backwards come to the first stage last, when later stages are at the
next mini-batch: their gradients of shared weights wait for it, and the new version of these weights is made then,
before any pass uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ....errors import BadInput
from ....problem import Chain, connected
from ...exchange.collective import ChunkSum, share_from
from ...exchange.transport import Group
from ...lowering.lowered_run import LoweredRun
from ...measure.recorder import Recorder
from ...model.loaded import LoadedModel
from ...model.network import tied_layers
from ..rank import Rank
from ..weights.buckets import Sharing
from ..weights.gradients import Gradients
from .exchanges import Exchange, Shared, Summed, Way
from .factors import Clipping, Scaling, overflow
from .stepper import Factor, Stepper


def sums_of(
    stage: int,
    gradients: Gradients,
    stepper: Stepper,
    recorder: Recorder,
    group: Group = None,
    coarsening: int | None = None,
) -> Exchange:
    """Return what the replicas in ``group`` exchange; None is for one alone."""
    about = stage, gradients, stepper, recorder
    if group is not None and stepper.chunks is None:
        chunks = stepper.chunks_of(Sharing(0, 1, coarsening))
        return Summed(*about, group, (x for x in chunks if x.summed))
    if group is not None and stepper.chunks:
        return Shared(*about, group, (x for x in stepper.chunks if x.summed or not gradients.waits))
    return Exchange(*about)


class StageUpdate:
    """Makes new versions of a stage's weights, whose sums come by a ``way``; with replicas :meth:`reduce` comes before.

    At most ``added`` gradients of a weight are summed. With ``clipping`` all gradients are :meth:`measured` before; of
    the weights that other stages have too it is those at ``counted`` that are counted here.
    """

    def __init__(
        self,
        way: Way,
        recorder: Recorder,
        scaling: Scaling | None = None,
        clipping: Clipping | None = None,
        added: int = 1,
        counted: Sequence[int] = (),
    ) -> None:
        self._way, self._exchange = way, way.exchange
        self._stage, self.gradients = way.exchange.stage, way.exchange.gradients
        self.stepper, self.versions = way.exchange.stepper, self.gradients.versions
        self._recorder, self._scaling, self._clipping = recorder, scaling, clipping
        self._added, self._counted = added, counted
        self._overflows: Tensor | None = None

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the stage keeps and uses for updates, and whether it is in host memory for want of room."""
        for there in (self.versions.tensors(), self.gradients.tensors(), self._exchange.scratch()):
            yield from ((tensor, False) for tensor in there)
        yield from self.stepper.tensors()

    def reduce(self, version: int) -> None:
        """Begin the sum of the gradients from which ``version`` will be made, unless it is known to be skipped."""
        if self._scaling is not None:
            if self._scaling.decided == version and self._scaling.skips:
                return
            if self._scaling.agrees and self._scaling.decided < version:
                self._overflows = self.overflows()
        self._check(version)
        self._way.begin(version)

    def overflows(self) -> Tensor | None:
        """Return whether the gradient for the next update overflows, or its sum might, as it was before the sum."""
        found, self._overflows = self._overflows, None
        return overflow(self.gradients.due, self._added) if found is None else found

    def measured(self) -> list[Tensor]:
        """Return the gradients whose norm this rank answers for, once they are summed; all replicas together."""
        if self._scaling is not None and self._scaling.skips:
            return []
        self._way.join()
        due = self.gradients.due
        return [*self._exchange.answered(), *(x for i in self._counted if (x := due[i]) is not None)]

    def update(self, version: int) -> None:
        """Make ``version``, or the same weights again where the update is skipped."""
        if self._scaling is not None and self._scaling.skips:
            self._way.join()
            self._exchange.drop()
            start = self._recorder.mark()
            self.gradients.end_update(version, skipped=True)
            self.versions.rename(version)
            self._recorder.note("UPDATE", self._stage, version, start)
            return
        factor: Factor = 1.0 if self._scaling is None else 1 / self._scaling.used
        if self._clipping is not None:
            factor = factor * self._clipping.factor(version)
        if not self._exchange.sums:
            self._check(version)
        every = self._exchange.parts
        given: Sequence[Tensor | None] = ()
        for index, parts in enumerate(every):
            self._way.wait(index)
            start = self._recorder.mark()
            if index == 0:
                given = self._begin()
            for part in parts:
                self.stepper.step(part, given, factor)
            if index == len(every) - 1:
                self._end(version)
            self._recorder.note("UPDATE", self._stage, version, start)
            self._exchange.stepped(index)

    def update_tied(self, version: int) -> None:
        """Step the weights whose gradients, which other ranks have too, have waited for that."""
        waiting = self.gradients.tied
        if waiting is None:
            return
        start = self._recorder.mark()
        self.stepper.step_tied(waiting, 1.0 if self._scaling is None else 1 / self._scaling.used)
        self.stepper.finish()
        self.gradients.end_tied()
        self._recorder.note("UPDATE", self._stage, version, start)

    def _begin(self) -> list[Tensor | None]:
        """Return the gradient to step with."""
        given = self.gradients.begin_update()
        self.versions.begin()
        self.stepper.begin()
        return given

    def _end(self, version: int) -> None:
        if self.gradients.tied is None:
            self.stepper.finish()
        self.gradients.end_update(version)
        self.versions.end(version)

    def _check(self, version: int) -> None:
        if self._scaling is not None:
            self._scaling.check(version, self.gradients.due, self._added, self._recorder.later)


# --- weights that stages share ----------------------------------------------------------------------------------------


Stages = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tie:
    """A trained weight of which several devices have copies: for the first stage on each of them that uses it the layer
    that has it first, and its name there."""

    places: Mapping[int, tuple[int, str]]

    @property
    def stages(self) -> Stages:
        """The stages, in order."""
        return tuple(sorted(self.places))

    def copy_in(self, s: int, model: LoadedModel) -> nn.Parameter:
        """Return the copy of stage ``s``, before any update of it."""
        layer, name = self.places[s]
        return model.layers[layer].module.get_parameter(name)


def check_ties(model: LoadedModel, chain: Chain, cuts: Sequence[int]) -> None:
    """Raise BadInput, naming the first difference, unless ``model`` shares weights as ``chain``, its profile, says.

    Stages, which begin at ``cuts``, can share parameters only: not storages of several ones, and no buffers, but for
    those that layers of a traced model only read.
    An evaluation, whose operations may lie in other layers, updates none.
    """
    if not model.training:
        return
    found = tied_layers([layer.module for layer in model.layers])
    known, real = _together(chain.tied), _together(found)
    for one, other in found:
        if known.get(one, one) != known.get(other, other):
            raise BadInput(
                f"model: {_layers(model, one, other)} share weights, which the plan's profile {chain.name} doesn't "
                "say; profile the model again"
            )
    for one, other in chain.tied:
        if real.get(one, one) != real.get(other, other):
            raise BadInput(
                f"model: {_layers(model, one, other)} share no weights; the plan's profile {chain.name} says they do"
            )
    stage_of = [sum(cut <= layer for cut in cuts) for layer in range(len(model.layers))]
    first: dict[int, tuple[int, Tensor]] = {}  # storage -> who has it
    for layer, module in enumerate(own.module for own in model.layers):
        for tensor in (*module.parameters(), *(module.buffers() if model.chain else ())):
            where, same = first.setdefault(tensor.untyped_storage()._cdata, (layer, tensor))
            if stage_of[where] == stage_of[layer] or not tensor.numel():
                continue
            if same is not tensor or not isinstance(tensor, nn.Parameter):
                what = "memory, but not one parameter" if isinstance(tensor, nn.Parameter) else "a buffer"
                raise BadInput(
                    f"model: {_layers(model, where, layer)} share {what}; copies in stages {stage_of[where]} and "
                    f"{stage_of[layer]} would not stay equal"
                )


def _layers(model: LoadedModel, one: int, other: int) -> str:
    return f"layers {one} ({model.layers[one].name}) and {other} ({model.layers[other].name})"


def _together(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the first layer of those that each layer is connected with."""
    return {layer: min(layers) for layers in connected(pairs) for layer in layers}


def ties_of(lowered: LoweredRun, model: LoadedModel) -> list[Tie]:
    """Return the weights that stages of ``model``, as it was built, share; in one order on all ranks.

    BadInput for one whose gradients the plan, whose profile doesn't say which layers have it, would leave unsummed.
    """
    places: dict[nn.Parameter, dict[int, tuple[int, str]]] = {}
    for s, stage in enumerate(lowered.plan.allocation.stages):
        for i, layer in enumerate(model.of(stage), stage.start):
            for name, parameter in layer.module.named_parameters():
                if parameter.requires_grad:
                    places.setdefault(parameter, {}).setdefault(s, (i, name))
    ties = [Tie({s: found[s] for s in lowered.homes(found)}) for found in places.values()]
    ties = [tie for tie in ties if len(tie.places) > 1]
    for tie in ties:
        if not any(set(tie.stages) <= set(stages) for stages in lowered.tied):
            index, name = tie.places[tie.stages[0]]
            raise BadInput(
                f"model: {name} of layer {index} ({model.layers[index].name}) is shared by other layers than in the "
                f"plan's profile {lowered.plan.chain.name}; profile the model again"
            )
    return ties


def separated(lowered: LoweredRun, rank: int, model: LoadedModel) -> LoadedModel:
    """Return ``model`` with stages of ``rank`` that share no module, as each puts versions of its own into it: a later
    one has copies of its layers, with the same weights as far as they are shared."""
    layers = list(model.layers)
    seen: set[nn.Module] = set()
    for s in lowered.stages_of(rank):
        stage = lowered.plan.allocation.stages[s]
        modules = model.modules(stage)
        parts = {part for module in modules for part in module.modules()}
        if parts & seen:
            same = {id(p): p for part in seen for p in part.parameters(recurse=False)}
            for i, copy in enumerate(deepcopy(modules, same), stage.start):
                layers[i] = layers[i].with_module(copy)
        seen |= parts
    return replace(model, layers=tuple(layers), roots=())  # what has been copied can go


def copies_added(lowered: LoweredRun, s: int, ties: Iterable[Tie]) -> int:
    """Return how many gradients are added up over ranks, at most, for a weight of stage ``s``."""
    replicas = [stage.replicas for stage in lowered.plan.allocation.stages]
    return max([replicas[s], *(sum(replicas[x] for x in tie.stages) for tie in ties if s in tie.places)])


def share_ties(
    rank: Rank, ties: Iterable[Tie], groups: Mapping[Stages, Group], masters: Mapping[nn.Parameter, Tensor]
) -> None:
    """Give all copies the weights, in full precision (``masters`` where there are any), of the first stage's."""
    for tie in ties:
        copy = next((tie.copy_in(s, rank.model) for s in rank.stages if s in tie.places), None)
        if copy is None:
            continue
        value = masters.get(copy, copy.data).to(copy.device)
        share_from(rank.lowered.ranks_of(tie.stages[0])[0], groups[tie.stages], [value])
        masters.get(copy, copy.data).copy_(value)


class TiedSums:
    """Sums the gradients of ``ties`` over all their copies, which are on different ranks."""

    def __init__(
        self,
        model: LoadedModel,
        ties: Iterable[Tie],
        updates: Mapping[int, StageUpdate],
        groups: Mapping[Stages, Group],
        recorder: Recorder,
        scaling: Scaling | None,
    ) -> None:
        self._updates, self._groups, self._recorder, self._scaling = updates, groups, recorder, scaling
        self._own: list[tuple[Stages, int, int]] = []  # stages of a tie; the own one, and which of its weights it is
        for tie in ties:
            for s in set(tie.stages) & updates.keys():
                index = updates[s].versions.place_of(tie.copy_in(s, model))
                assert index is not None, "ties are of trained weights"
                self._own.append((tie.stages, s, index))

    def reduce(self, stages: Stages, version: int) -> None:
        """Give all copies of the weights that some of ``stages`` share the sum of their gradients.

        Every rank sums in the order of the ties, and so waits for no rank that waits for it.
        """
        if self._scaling is not None and self._scaling.skips:
            return
        for holders, s, index in self._own:
            if not set(holders) <= set(stages):
                continue
            start = self._recorder.mark()
            total = self._updates[s].gradients.tied_gradient(index)
            flat = total.contiguous()
            chunk = ChunkSum(flat.view(-1), self._groups[holders])
            chunk.begin()
            chunk.turn()
            chunk.end()
            if flat is not total:
                total.copy_(flat)
            self._recorder.note("REDUCE", s, version, start)
        for s in stages:
            if s in self._updates:
                self._updates[s].update_tied(version)
