"""What does each layer of a measured model cost, and how steady were its times? A table on standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...cost.memory_model import weights_of
from ...cost.saved import saved_bytes
from ...cost.time_model import whole_step_ns
from ...names import shown
from ...problem import Chain
from ...units import format_bytes, format_ns
from ..looks import Name, console, make_table, print_fitted

if TYPE_CHECKING:
    from ...runtime.profiler.measure import MeasuredModel

UNSTEADY = 0.25  # spread over median above which a layer's time is called unsteady


def print_measurements(measured: MeasuredModel, chain: Chain) -> None:
    """Print one row per layer as it was measured, totals, and what the reader should know about the numbers."""
    out, estimated = console(stderr=True), chain.within is not None
    spread = [] if estimated else ["±"]
    columns = ("forward", *spread, "backward", *spread, "optimizer", "weights", "saved", "output")
    caption = "times in ms, estimated" if estimated else "times in ms, ± width of the middle half"
    table = make_table("layer", *columns, left=("layer",), names=("layer",), space=2, caption=caption)
    steps = np.cumsum([x.forward_ns + x.backward_ns for x in chain.layers])  # where one of them ends
    spreads, bound, at = np.zeros((len(chain), 2), dtype=np.int64), set[int](), 0
    for index, x in enumerate(measured.layers):  # several of which may be one
        at += x.layer.forward_ns + x.layer.backward_ns
        row = min(int(np.searchsorted(steps, at)), len(chain) - 1)
        spreads[row] += x.forward_spread_ns, x.backward_spread_ns
        bound |= {row} if index in measured.host_bound else set()
    unsteady = 0
    for index, layer in enumerate(chain.layers):
        forward, backward = spreads[index]
        unsteady += forward + backward > UNSTEADY * (layer.forward_ns + layer.backward_ns)
        times = (layer.forward_ns, forward, layer.backward_ns, backward, layer.optimizer_ns)[:: 2 if estimated else 1]
        sizes = (layer.weight_bytes, int(saved_bytes(chain, index, index + 1)), layer.output_bytes)
        name = Name.of(layer.name + (" h" if index in bound else ""))
        table.add_row(name, *(f"{t / 1e6:.3f}" for t in times), *map(format_bytes, sizes))
    print_fitted(out, table)
    whole, count, others = chain.sums, len(chain), chain.beside - 1
    beside = f", beside {others} other process{'es' if others > 1 else ''}" if others else ""
    out.print(
        f"{shown(chain.name)} on {shown(chain.device)}{beside}: "
        f"forward {format_ns(int(whole.forward_ns[-1]))}, backward {format_ns(int(whole.backward_ns[-1]))}, "
        f"optimizer {format_ns(whole_step_ns(chain, 0, count))}; "
        f"weights {format_bytes(weights_of(chain, 0, count)[0])}, "
        f"saved {format_bytes(int(saved_bytes(chain, 0, count)))}"
    )
    if chain.within is not None:
        low, high = chain.within
        out.print(f"when measured 9 of 10 such estimates took {low:.2f} to {high:.2f} times as long")
    if chain.reading_ns:
        first, last = shown(measured.layers[0].layer.name), shown(measured.layers[-1].layer.name)
        where = "beside the GPU" if chain.reads_beside else f"once in the forward of {first} and once in that of {last}"
        out.print(f"reading takes {format_ns(chain.reading_ns)} a microbatch, {where}")
    for one, other in chain.tied[:1]:
        more = f" (and {len(chain.tied) - 1} more)" if len(chain.tied) > 1 else ""
        names = f"{shown(chain.layers[one].name)} and {shown(chain.layers[other].name)}{more}"
        out.print(f"note: {names} share weights, which each of them counts, and the sum once")
    if bound:
        out.print(
            f"note: the GPU waits for its host in {len(bound)} of {len(chain)} layers, marked h: larger "
            "microbatches cost little more there, and --engine compiled or graphs less"
        )
    if unsteady:
        out.print(
            f"note: times of {unsteady} of {len(chain)} layers spread over more than {UNSTEADY:.0%}; "
            "measure again with more --steps on a quieter machine"
        )
    if len(chain) != len(measured.layers):
        out.print(f"note: {len(measured.layers)} layers were merged into {len(chain)}; --granularity node keeps them")
