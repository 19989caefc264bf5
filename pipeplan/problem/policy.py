"""How are weights kept, and how often are they updated? A row for each policy, and what a problem says beside it.

Versions are numbered from 0, the initial weights; update j makes version j + 1 from mini-batch j. A policy is two rules
that say which version a forward and a backward get. It has no state: with them all of a run's versions follow from the
order of its passes, before it starts. Nobody else compares the names of policies; a new one is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..choices import BY_MATRIX, DRAINED, OPTIMIZERS, Optimizer, Weights
from ..choices import Precision as Precision
from ..choices import Zero as Zero


@dataclass(frozen=True, slots=True)
class WeightRules:
    """Two rules, and what follows. ``made`` is the number of updates that a stage has made when an operation's turn
    comes.

    ``forward_version(minibatch, made, entered)`` gives the version of a forward, where ``entered`` is the version with
    which the first stage ran the microbatch forward; ``backward_version(forward, made, common)`` that of the backward
    whose forward used version ``forward``, where ``common`` is the newest version that all stages had when the last one
    began the backward. ``most_versions`` is how many may be needed at once, None: one for each update that a microbatch
    in flight misses. ``fresher`` names the policy that has the same plans, with gradients that are less late.

    ``drains``: the pipeline empties before every update. ``together``: all stages make every update from the same
    microbatches. ``within_update``: at most the microbatches of one update are in flight at once. ``any_interval``:
    plans may be asked for without saying how often to update. ``reads_newest``: a backward differentiates what the
    forward has stored, but with other weights than the forward's. ``synced`` are the rules with vertical sync, None
    where that has no meaning; ``alone`` names the policy of which each stage keeps the versions that its own
    microbatches need and no more: a relaxation, for searches that see one stage at a time.
    """

    forward_version: Callable[[int, int, int], int]
    backward_version: Callable[[int, int, int], int]
    most_versions: int | None
    meaning: str = ""
    drains: bool = False
    together: bool = False
    within_update: bool = False
    any_interval: bool = False
    reads_newest: bool = False
    synced: WeightRules | None = None
    alone: Weights | None = None
    fresher: Weights | None = None


def _newest(minibatch: int, made: int, entered: int) -> int:
    return made


def _as_entered(minibatch: int, made: int, entered: int) -> int:
    return entered


def _as_forward(forward: int, made: int, common: int) -> int:
    return forward


_TWO = WeightRules(
    lambda minibatch, made, entered: max(minibatch - 1, made),
    _as_forward,
    most_versions=2,
    meaning="at most two versions, forwards read the newest that is made, never drained",
    together=True,
    within_update=True,
    any_interval=True,
)
WEIGHTS: dict[Weights, WeightRules] = {
    # GPipe, 1F1B with flush: every pass of a mini-batch uses the weights that all mini-batches before it have made
    "flush": WeightRules(
        _newest,
        _as_forward,
        most_versions=1,
        meaning="one version, the pipeline drains before every update",
        drains=True,
        together=True,
    ),
    # PipeDream-2BW's two versions, of which a forward reads the newer where its stage has made that
    "2bw": _TWO,
    # PipeDream-2BW: W(t+1) = W(t) - lr * grad f(W(t-1)), in both passes (ALGORITHMS sections 3 and 10.6)
    "2bw-uniform": replace(
        _TWO,
        forward_version=lambda minibatch, made, entered: max(minibatch - 1, 0),
        meaning="two versions of them, every gradient one update late, never drained",
        fresher="2bw",
    ),
    # PipeDream's weight stashing: the stage's newest weights, kept for the backward (PipeDream section 3.3)
    "stash": WeightRules(
        _newest,
        _as_forward,
        most_versions=None,
        meaning="a version for each update that a microbatch in flight misses, never drained",
        # PipeDream's vertical sync: on every stage the version with which the microbatch entered the first
        synced=WeightRules(_as_entered, _as_forward, most_versions=None, alone="stash"),
    ),
    # TiMePReSt without vertical sync: the newest weights in either pass, so one version
    "latest": WeightRules(
        _newest,
        lambda forward, made, common: made,
        most_versions=1,
        meaning="one version, forward and backward on the newest",
        reads_newest=True,
        # TiMePReSt's: a pass, in either direction, uses on every stage what is newest on all of them when it starts
        synced=WeightRules(
            _as_entered, lambda forward, made, common: common, most_versions=None, reads_newest=True, alone="stash"
        ),
    ),
}


MICROBATCHES_PER_DEVICE = 4  # of an update where nobody says, under every policy: GPipe's rule of thumb
ENDLESS = 10**15  # microbatches between two updates, which then take a nanosecond of each at most
CLIPPED_TOGETHER = (  # of the policy's weights, where they are others than those
    "the norm of all gradients is known once every stage has its own, but with weights {weights} each stage updates as "
    "soon as it has its own; weights flush and 2bw update from the same microbatches"
)
Engine = Literal["torch"]
NOT_PREDICTED = (
    "backwards with newest weights read the true ones, which are at hand only in fp32 and without --zero, --offload "
    "and --vertical-sync"
)


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the replicas of a stage hold parts of, beside the optimizer's state, and what they exchange for it.

    Where weights, or the gradient, are spread over them so many buckets of each are whole at a time; None: all are. In
    each ``forward`` and ``backward`` of theirs all weights are gathered so many times, beside what layers compute, and
    behind layers gradients are ``scattered``. At an ``update`` so many of the two, ``sums`` of them of gradients.
    """

    weights: int | None = None
    gradient: int | None = None
    forward: int = 0
    backward: int = 0
    scattered: int = 0
    update: int = 2
    sums: int = 2


SHARING: dict[Zero, Sharing] = {  # Rajbhandari et al., ZeRO: nothing, P_os, P_os+g, P_os+g+p
    0: Sharing(),
    1: Sharing(sums=1),
    2: Sharing(gradient=1, scattered=1, update=1, sums=0),
    3: Sharing(weights=2, gradient=1, forward=1, backward=1, scattered=1, update=0, sums=0),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """How weights, gradients and optimizer state are kept, and how often they are updated (ALGORITHMS section 3).

    ``accumulate`` is the number of microbatches per update. None means: open, the planner decides it. Until then 2bw
    takes costs at their limit, the updates so rare that they cost next to nothing and that microbatches in flight are
    never too many for two versions: what is infeasible then, or takes longer, is and does so at every interval. Other
    policies take one update per microbatch.
    ``precision`` "mixed" has weights and gradients in 16 bits beside fp32 weights; under "autocast" all of them are as
    built, and what activations take is the profile's to say.
    ``bucket_parameters`` is the number of parameters whose optimizer state is on the device at a time with ``offload``,
    and that are gathered or scattered together with ``zero`` 2 and 3.
    The optimizer steps once behind a drained batch; elsewhere each backward is charged its share of that. With
    ``coarsening``, for drained batches, gradients are summed in chunks of so many buckets, and the optimizer steps
    one chunk while the next is summed (Myelin section V-C); None: it steps behind the sums.
    ``bytes_per_parameter`` is what another engine holds of one version of the weights, their gradient and the
    optimizer's state; None: what ``optimizer`` and ``precision`` say. ``shared_bytes_per_parameter`` of them are what
    replicas share with ``zero``.
    With ``zero`` 1 the replicas of a stage share its optimizer state, and the fp32 weights of mixed precision: each
    keeps and steps an equal part; 2: and of the gradient, which each backward scatters; 3: and of the weights, which
    each pass gathers (:data:`SHARING`); 0: each keeps and steps all of it. A search that looks at one of several
    ``pipelines`` side by side takes each replica for as many. No file has that.
    ``engine``: whose runtime holds what goes between drained stages, None for pipeplan's own. That of torch has buffers
    to receive every microbatch of a mini-batch.
    With ``clip`` gradients are clipped by the total norm over all stages: no update begins before every stage has its
    gradient and they have summed one number. With ``ema`` a running average of the weights is part of the optimizer's
    state. With ``predict`` passes read predicted weights if gradients are late, and fp32 weights are kept beside them.
    """

    weights: Weights = "2bw"
    accumulate: int | None = None
    optimizer: Optimizer = "sgd"
    precision: Precision = "fp32"
    offload: bool = False
    vertical_sync: bool = False
    bucket_parameters: int = 16 * 10**6
    coarsening: int | None = None
    bytes_per_parameter: int | None = None
    shared_bytes_per_parameter: int | None = None
    zero: Zero = 0
    engine: Engine | None = None
    pipelines: int = 1
    clip: bool = False
    ema: bool = False
    predict: bool = False

    def sharers(self, replicas: int) -> int:
        """Return over how many of a stage's ``replicas`` its optimizer state is spread."""
        return replicas * self.pipelines if self.zero else 1

    @property
    def sharing(self) -> Sharing:
        """What replicas share, and exchange for it."""
        return SHARING[self.zero]

    @property
    def state_eighths(self) -> int:
        """The optimizer's state over the fp32 weights, in eighths, and these where passes read predicted ones."""
        apart = self.predict and self.precision != "mixed" and not self.drains
        return OPTIMIZERS[self.optimizer].eighths + 8 * self.ema + 8 * apart

    @property
    def predictable(self) -> bool:
        """Whether passes may read predicted weights: where backwards read the newest, they need the true ones whole."""
        whole = self.precision != "mixed" and not (self.zero or self.offload or self.vertical_sync)
        return whole or not self.rules.reads_newest

    @property
    def rules(self) -> WeightRules:
        """The rules of ``weights``, with vertical sync where that has a meaning."""
        row = WEIGHTS[self.weights]
        return row.synced if self.vertical_sync and row.synced is not None else row

    @property
    def drains(self) -> bool:
        """Whether the pipeline empties before every update."""
        return WEIGHTS[self.weights].drains

    def drained(self, accumulate: int) -> Policy:
        """Return the policy that empties the pipeline before every update, of ``accumulate`` microbatches."""
        return replace(self, weights=DRAINED, accumulate=accumulate, vertical_sync=False)

    @property
    def most_lifetime(self) -> int | None:
        """The most periods for which a microbatch may be in flight, None where weights set no limit."""
        return self.accumulate if self.rules.within_update else None

    @property
    def updates_together(self) -> bool:
        """Whether all stages make every update from the same microbatches, so that copies of weights stay equal.

        Under the other policies each stage updates when its own backwards are over, at other times than the rest.
        """
        return WEIGHTS[self.weights].together

    def goes_with(self, weights: Weights) -> bool:
        """Whether ``weights`` could be kept so instead: where gradients are clipped all stages update together, and
        where replicas exchange parts in their passes the pipeline drains."""
        row = WEIGHTS[weights]
        return (not self.clip or row.together) and (not self.sharing.scattered or row.drains)

    @property
    def overlaps(self) -> bool:
        """Whether optimizer steps overlap with the sums behind a drained batch, which the norm of all waits for."""
        return self.coarsening is not None and not self.clip

    @property
    def waits_for_norm(self) -> bool:
        """Whether an update's gradients wait aside for the norm of all, while passes make the next ones."""
        return self.clip and not self.drains

    def update_interval(self, replicas: int = 1) -> int:
        """Microbatches between two weight updates of a stage with ``replicas`` replicas."""
        return max(replicas, self.accumulate or (ENDLESS if self.open else 1))

    @property
    def open(self) -> bool:
        """Whether costs are those of any interval between updates: lower bounds for each."""
        return self.accumulate is None and WEIGHTS[self.weights].any_interval


def matrix_state(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return how many numbers each optimizer of whole matrices keeps for weights of ``shapes``."""
    found = list(shapes)
    return tuple(sum(map(kept, found)) for kept in (OPTIMIZERS[name].kept for name in BY_MATRIX) if kept is not None)


def small_matrices(name: Optimizer, kept: int, total: int, where: str) -> str | None:
    """Return in words that more is ``kept`` of ``total`` weights than plans count for an optimizer; None if not."""
    row = OPTIMIZERS[name]
    if 8 * kept <= row.eighths * total:
        return None
    return (
        f"optimizer {name}: keeps {kept:,} numbers for the {total:,} weights of {where}, whose matrices are small or "
        f"few; plans count {row.share} of them, or what --bytes-per-parameter says of weights, gradients and state"
    )
