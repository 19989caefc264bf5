"""What can a named GPU do? Data-sheet figures from a table, or from a user's own file, to estimate profiles from."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Literal

import msgspec

from ...choices import ENGINES, USUAL_ENGINE
from ...cost.roofline import Constants
from ...errors import BadInput
from ...names import shown
from ...units import parse_bandwidth, parse_bytes, parse_time
from ..forms import read_json
from ..text import read_text

KINDS = (
    "product", "attention", "convolution", "convolution-1x1", "convolution-3x3", "convolution-grouped", "batch-norm",
    "norm", "activation", "pooling", "other",
)  # fmt: skip
"""Kinds of kernels. Convolutions of several groups are ``-grouped``, other ones of 3 x 3 at each position ``-3x3``,
norms that are no batch norm are ``norm``."""
RATES = {  # of the shares, where none are said: what fits ten V100 profiles (scripts/checks/published_layers.py)
    "batch-norm": 0.52, "pooling": 0.56, "convolution": 1.4, "convolution-1x1": 1.1, "convolution-3x3": 2.1,
    "convolution-grouped": 0.65,
}  # fmt: skip
TENSOR_RATES = {kind: 0.8 if "convolution" in kind else rate for kind, rate in RATES.items()}
"""Likewise where convolutions run on tensor cores, of which no profiles were at hand."""
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Units = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=100)]


def parse_host_time(text: str, place: str) -> tuple[int, int]:
    """Return the nanoseconds forward and backward that ``20us,10us`` names, ``20us`` for both, or an engine's name."""
    parts = ENGINES.get(text, text).split(",")
    if len(parts) > 2 or not text[:1].isdigit() | (text in ENGINES):
        raise BadInput(
            f"{place}: '{shown(text)}' isn't a time such as 20us, none forward and backward such as "
            "20us,10us, and none "
            f"of {', '.join(ENGINES)}"
        )
    forward, backward = (parse_time(part, place) for part in (parts[0], parts[-1]))
    return forward, backward


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device: memory and its bandwidth, the link to its peers per direction, dense peaks by type in 1e12 flop/s.

    ``tf32`` is what convolutions of float32 run in, as torch has it by default; products of float32 matrices don't.
    ``units`` are its multiprocessors, by which a product's shape decides what it reaches; None: no shape is worse.
    ``launch`` is the least time of a kernel. The shares are what kernels reach of the peak and of the bandwidth, and
    ``rates`` what those of some :data:`KINDS` reach of these shares (None: :data:`RATES`). ``host_time`` is what the
    host takes to issue an operation, forward and backward (``20us,10us``, or one for both); None: as long as the
    engine's (:data:`.choices.ENGINES`). ``source`` says where such constants are from; ``measured`` whether runs, a
    table of layers or products, or nothing has checked them; ``error`` within how much of what was measured nine of ten
    estimates were, where kernels and not their host bind.
    """

    name: str
    memory: str
    bandwidth: str
    tflops: dict[str, float]
    link: str | None = None
    launch: str = "5us"
    units: Units | None = None
    compute_share: Share = 0.8
    bandwidth_share: Share = 0.9
    host_time: str | None = None
    rates: dict[str, Rate] | None = None
    source: str = ""
    measured: Literal["none", "table", "runs"] = "none"
    error: Share | None = None

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes."""
        return parse_bytes(self.memory, "$.memory")

    @property
    def bandwidth_bytes(self) -> int:
        """Bytes per second from and to the memory."""
        return parse_bandwidth(self.bandwidth, "$.bandwidth")

    @property
    def doubt(self) -> str:
        """In words what plans on estimates for it take for granted."""
        if self.error is not None:
            return f"estimates within {self.error:.0%}, as 9 of 10 for it were of what was measured"
        return (
            "kernels reach what an A100's do of its peak; nothing measured on this GPU has checked that (a B200 took "
            "1.45 times as long)"
        )

    @property
    def launch_ns(self) -> int:
        """The least time of one operation."""
        return parse_time(self.launch, "$.launch")

    def constants(self, host_time: str | None = None) -> Constants:
        """Return what turns work into time, with a ``host_time`` for :func:`parse_host_time` (None: its own)."""
        forward, backward = parse_host_time(host_time or self.host_time or USUAL_ENGINE, "$.host_time")
        return Constants(self.compute_share, self.bandwidth_share, self.launch_ns, forward, backward)

    def rate(self, kind: str, plain: bool = False) -> float:
        """Return what kernels of a kind reach of what others do, convolutions ``plain`` without tensor cores."""
        usual = RATES if plain else TENSOR_RATES
        return (usual if self.rates is None else self.rates).get(kind, 1.0)

    def on_tensor_cores(self, dtype: str) -> bool:
        """Whether convolutions of ``dtype`` run at a peak above that of plain float32."""
        return dtype in self.tflops and self.peak(dtype, convolution=True) > self.peak("float32")

    def peak(self, dtype: str, convolution: bool = False) -> float:
        """Return flop/s for numbers of ``dtype``; BadInput when the table has none."""
        if convolution and dtype == "float32":
            dtype = "tf32" if "tf32" in self.tflops else dtype
        if dtype not in self.tflops:
            raise BadInput(
                f"{shown(self.name)}: no peak is known for {dtype}, only for {shown(', '.join(self.tflops))}"
            )
        return self.tflops[dtype] * 1e12


@cache
def accelerators() -> dict[str, Accelerator]:
    """Return the table by short names."""
    text = resources.files(__package__).joinpath("accelerators.json").read_text(encoding="utf-8")
    return msgspec.json.decode(text, type=dict[str, Accelerator])


def accelerator(text: str) -> Accelerator:
    """Return the accelerator of a short name, or of a JSON file of the same form as one entry of the table."""
    table = accelerators()
    if text.lower() in table:
        return table[text.lower()]
    if not text.endswith(".json"):
        raise BadInput(f"no accelerator is named '{shown(text)}'; known are {', '.join(table)}, or FILE.json")
    found = read_json(read_text(text), Accelerator, text)
    if not found.tflops or any(peak <= 0 for peak in found.tflops.values()):
        raise BadInput(f"{text}: $.tflops must have positive peaks")
    if unknown := sorted(set(found.rates or ()) - {*KINDS}):
        raise BadInput(
            f"{text}: $.rates: no kind of kernel is named '{shown(unknown[0])}'; known are {', '.join(KINDS)}"
        )
    try:
        _ = found.memory_bytes, found.bandwidth_bytes, found.constants()  # refuse wrong units here, not later
    except BadInput as error:
        raise BadInput(f"{text}: {error}") from None
    return found


def with_constants(device: Accelerator, constants: Constants, source: str) -> Accelerator:
    """Return the accelerator with other constants, and where they are from."""
    forward, backward = (f"{round(ns)}ns" for ns in (constants.forward_host_ns, constants.backward_host_ns))
    return msgspec.structs.replace(
        device,
        compute_share=round(constants.compute_share, 4),
        bandwidth_share=round(constants.bandwidth_share, 4),
        launch=f"{round(constants.kernel_ns)}ns",
        host_time=f"{forward},{backward}",
        source=source,
    )


def constants_of(device: Accelerator, host_time: str | None = None) -> Constants:
    """Return what turns work into time on ``device``, with the ``--host-time`` that is said."""
    if host_time is not None:
        parse_host_time(host_time, "--host-time")
    return device.constants(host_time)
