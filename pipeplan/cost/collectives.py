"""How long do the ranks of a group take to exchange a tensor? A fixed part, a part for each step, and the bytes.

Source: fitted on 98 measured points of eight A100s by NVSwitch (vTrain's tables, Bang et al. 2024; 1 MiB to 512 MiB,
2 to 8 ranks), where it is 9.3% off on average.
"""

from __future__ import annotations

from dataclasses import replace

from ..integers import ceil_div
from ..problem import Chain, Layer

FIXED_NS = 22_000
STEP_NS = 3_500
SHARE = (3, 4)  # of the link's bandwidth
STEPS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # over the ranks but one: how often each part travels


def collective_ns(kind: str, size: int, ranks: int, bandwidth: int) -> int:
    """Return the ns of a collective over ``ranks`` of a tensor of ``size`` bytes, all of it, by links of ``bandwidth``
    bytes/s each way: NCCL's rings, in which every rank sends each part but one, twice in an all-reduce."""
    if ranks == 1 or not size:
        return 0
    steps = STEPS[kind] * (ranks - 1)
    above, below = SHARE
    return FIXED_NS + steps * STEP_NS + ceil_div(steps * size * below * 10**9, ranks * bandwidth * above)


def with_exchanges(chain: Chain, bandwidth: int) -> Chain:
    """Return a rank's chain with the time that its group's exchanges take over links of ``bandwidth``, in place of
    the exchanges. A pass takes its kernels and what is exchanged, or as long as its host, if that is longer."""
    layers = []
    for layer in chain.layers:
        forward, backward = (
            max(0, _exchanged_ns(layer, back, chain.tensor, bandwidth) - (layer.idle_ns or (0, 0))[back])
            for back in (False, True)
        )
        layers.append(
            replace(
                layer,
                forward_ns=layer.forward_ns + forward,
                backward_ns=layer.backward_ns + backward,
                backward_weight_ns=layer.weight_part_ns,
                exchanges=(),
                idle_ns=None,
                work=None,
            )
        )
    return replace(chain, layers=tuple(layers))


def _exchanged_ns(layer: Layer, backward: bool, ranks: int, bandwidth: int) -> int:
    """Return what the exchanges of one pass take, hidden ones only as far as they are longer than the pass."""
    seen = hidden = 0
    for one in layer.exchanges:
        if one.backward == backward:
            each = collective_ns(one.kind, one.bytes, ranks, bandwidth)
            seen, hidden = seen + (one.count - one.hidden) * each, hidden + one.hidden * each
    return seen + max(0, hidden - (layer.backward_ns if backward else layer.forward_ns))
