"""What can a named GPU do? Data-sheet figures from a table, or from a user's own file, to estimate profiles from."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Literal

import msgspec

from ...choices import ENGINES, USUAL_ENGINE
from ...cost.roofline import Constants, spread_of_hosts
from ...errors import BadInput
from ...names import shown
from ...problem import Chain
from ...units import parse_bandwidth, parse_bytes, parse_time
from ..forms import read_json
from ..text import read_text

Rates = dict[str, float | tuple[float, float]]  # by kind, one for both shares or one for each
KINDS = (
    "product", "product-unaligned", "attention", "attention-backward", "convolution", "convolution-weights",
    "convolution-1x1", "convolution-1x1-weights", "convolution-3x3", "convolution-3x3-weights", "convolution-stem",
    "convolution-stem-weights", "convolution-grouped", "convolution-grouped-weights", "convolution-depthwise",
    "convolution-depthwise-weights", "batch-norm", "batch-norm-backward", "norm", "norm-backward", "softmax",
    "activation", "pooling", "pooling-backward", "pooling-average", "pooling-average-backward", "update", "other",
)  # fmt: skip
"""Kinds of kernels. Convolutions of a group for each channel are ``-depthwise``, of several groups ``-grouped``, other
ones of at most four channels ``-stem``, of 3 x 3 at each position ``-3x3``; ``-weights`` are weights' gradients. Norms
that are no batch norm are ``norm``, optimizers' fused kernels ``update``, products on tensor cores whose sides aren't
whole 16 bytes ``product-unaligned``."""
_LIKE = ("-weights", "-backward")  # what a kind may end in: it has its own rate, or that of the kind without
PLAIN = ("convolution-depthwise", "pooling")  # how kinds begin whose arithmetic is that of float32 without tensor cores
RATES: Rates = {
    # of the shares, where none are said: what fits ten V100 profiles (scripts/checks/published_layers.py)
    "batch-norm": 0.54, "batch-norm-backward": 0.68, "convolution": 1.7, "convolution-weights": 1.45,
    "convolution-1x1": 1.2, "convolution-1x1-weights": 0.88, "convolution-3x3": 2.1, "convolution-3x3-weights": 1.9,
    "convolution-grouped": 0.74, "convolution-grouped-weights": 0.46, "convolution-stem": 0.95,
    "convolution-stem-weights": 0.87, "pooling": 0.83, "pooling-backward": 0.62, "pooling-average": 0.18,
    "pooling-average-backward": 0.24,
    # of arithmetic and of traffic: what an H200's kernels reach (scripts/checks/published --source h200)
    "convolution-depthwise": (0.055, 1.0), "convolution-depthwise-weights": (0.025, 1.0),
    # whatever its shape: FlashAttention-2 (Dao 2023) has 0.65 in figures 5 and 6, causal, on an A100; iterations of
    # Vocabulary Parallelism, of 2,048 and 4,096 words, show 0.33
    "attention": 0.4,
}  # fmt: skip
MEASURED = "h200"  # whose rates convolutions on tensor cores have where none are said
WITHIN = {False: (0.83, 1.27), True: (0.85, 1.33)}
"""Without and with convolutions: what nine of ten estimates were multiplied by when measured, their host's time known,
of every source by what the others show (scripts/checks/published --ranges)."""
UNCHECKED = 1.45  # times as long kernels of a B200 took as what an A100's reach would say
HOSTS = ((9_000.0, 9_000.0), (65_000.0, 50_000.0))  # the least and the most that hosts of measured runs took
HOST_OFF = 1.5  # times as long or as short, where the host's time is said
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=100)]
Units = Annotated[int, msgspec.Meta(ge=1, le=100_000)]


def parse_host_time(text: str, place: str) -> tuple[int, int]:
    """Return the nanoseconds forward and backward that ``20us,10us`` names, ``20us`` for both, or an engine's name."""
    parts = ENGINES.get(text, text).split(",")
    if len(parts) > 2 or not text[:1].isdigit() | (text in ENGINES):
        raise BadInput(
            f"{place}: '{shown(text)}' isn't a time such as 20us, none forward and backward such as 20us,10us, "
            f"and none of {', '.join(ENGINES)}"
        )
    forward, backward = (parse_time(part, place) for part in (parts[0], parts[-1]))
    return forward, backward


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device: memory and its bandwidth, the link to its peers per direction, dense peaks by type in 1e12 flop/s.

    ``tf32`` is what convolutions of float32 run in, as torch has it by default; products of float32 matrices don't.
    ``units`` are its multiprocessors, by which a product's shape decides what it reaches; None: no shape is worse.
    ``launch`` is the least time of a kernel. The shares are what kernels reach of the peak and of the bandwidth, and
    ``rates`` what those of some :data:`KINDS` reach of these shares, or of each one (None: :data:`RATES`; a name: those
    of that entry of the table). ``"batch-norm half"`` are those on numbers of 16 bits, ``"convolution last"`` with
    channels last in memory; other types are called as in ``tflops``. ``host_time`` is what the host takes to issue an
    operation, forward and backward (``20us,10us``, or one for both); None: as long as the engine's
    (:data:`.choices.ENGINES`). ``source`` says where such constants are from; ``measured`` whether runs, a table of
    layers or products, or nothing has checked them, or only what was measured on its like (``derived``); ``within``
    what nine of ten estimates were multiplied by when measured, their host's time known (None: :data:`WITHIN`).
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
    rates: Rates | str | None = None
    source: str = ""
    measured: Literal["none", "derived", "table", "runs"] = "none"
    within: tuple[Factor, Factor] | None = None

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
        if self.measured in ("table", "runs"):
            return f"kernels reach what fits {self.source}"
        if self.measured == "derived":
            return f"kernels reach {self.source}; nothing measured on this GPU has checked that"
        return (
            "kernels reach what an A100's do of its peak; nothing measured on this GPU has checked that (a B200 took "
            "1.45 times as long)"
        )

    def range_of(self, chain: Chain, constants: Constants, convolutions: bool) -> tuple[float, float]:
        """Return what nine of ten estimates like a ``chain`` for it were multiplied by when measured: kernels are off,
        and a host takes other times, of which the usual ones are a guess."""
        own = constants.forward_host_ns, constants.backward_host_ns
        guess = own == parse_host_time(USUAL_ENGINE, "$")
        hosts = HOSTS if guess else tuple((own[0] * x, own[1] * x) for x in (1 / HOST_OFF, HOST_OFF))
        fast, slow = spread_of_hosts(chain, constants, hosts)
        low, high = self.within or WITHIN[convolutions]
        high *= UNCHECKED if self.within is None and self.measured == "none" else 1.0
        return round(low * fast, 2), round(high * slow, 2)

    @property
    def launch_ns(self) -> int:
        """The least time of one operation."""
        return parse_time(self.launch, "$.launch")

    def constants(self, engine: str | None = None) -> Constants:
        """Return what turns work into time, with the ``--engine`` that is said, for :func:`parse_host_time` (None: its
        own host's time)."""
        own = self.host_time or USUAL_ENGINE
        forward, backward = (
            parse_host_time(own, "$.host_time") if engine is None else parse_host_time(engine, "--engine")
        )
        return Constants(self.compute_share, self.bandwidth_share, self.launch_ns, forward, backward)

    def rate(self, kind: str, number: str, last: bool = False) -> tuple[float, float]:
        """Return what kernels of a kind on numbers that ``tflops`` calls so reach of the shares of peak and bandwidth,
        convolutions with channels ``last`` if said."""
        rates = self._rates
        if self.rates is None and kind.startswith("convolution") and not kind.startswith(PLAIN) and number != "float32":
            rates = accelerators()[MEASURED]._rates
        number = "half" if number in ("float16", "bfloat16") else number
        for like in (kind, *(kind.removesuffix(end) for end in _LIKE if kind.endswith(end))):
            for name in (*[f"{like} last"] * last, f"{like} {number}", like):
                if name in rates:
                    found = rates[name]
                    return found if isinstance(found, tuple) else (found, found)
        return 1.0, 1.0

    @property
    def _rates(self) -> Rates:
        if isinstance(self.rates, str):
            return accelerators()[self.rates]._rates
        return RATES if self.rates is None else self.rates

    def number(self, dtype: str, kind: str) -> str:
        """Return how ``tflops`` calls the numbers that kernels of a kind compute with, given those of ``dtype``."""
        if kind.startswith(PLAIN) and "float32" in self.tflops:
            return "float32"
        if kind.startswith("convolution") and dtype == "float32":
            return "tf32" if self.tflops.get("tf32", 0) > self.tflops.get(dtype, 0) else dtype
        return "float8" if dtype.startswith("float8") else dtype

    def peak(self, number: str) -> float:
        """Return flop/s for numbers that ``tflops`` calls so; BadInput when the table has none."""
        if number not in self.tflops:
            raise BadInput(
                f"{shown(self.name)}: no peak is known for {number}, only for {shown(', '.join(self.tflops))}"
            )
        return self.tflops[number] * 1e12


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
    if isinstance(found.rates, str) and found.rates not in table:
        raise BadInput(f"{text}: $.rates: no accelerator is named '{shown(found.rates)}'")
    named = {} if isinstance(found.rates, str) else found.rates or {}
    if any(
        not 0 < rate <= 100 for rates in named.values() for rate in (rates if isinstance(rates, tuple) else (rates,))
    ):
        raise BadInput(f"{text}: $.rates must be above 0, and at most 100")
    if unknown := sorted({name.partition(" ")[0] for name in named} - {*KINDS}):
        raise BadInput(
            f"{text}: $.rates: no kind of kernel is named '{shown(unknown[0])}'; known are {', '.join(KINDS)}"
        )
    try:
        _ = found.memory_bytes, found.bandwidth_bytes, found.constants()  # refuse wrong units here, not later
    except BadInput as error:
        raise BadInput(f"{text}: {error}") from None
    return found


def with_constants(
    device: Accelerator, constants: Constants, source: str, within: tuple[float, float] | None = None
) -> Accelerator:
    """Return the accelerator with other constants, where they are from, and ``within`` what they were right."""
    forward, backward = (f"{round(ns)}ns" for ns in (constants.forward_host_ns, constants.backward_host_ns))
    return msgspec.structs.replace(
        device,
        compute_share=round(constants.compute_share, 4),
        bandwidth_share=round(constants.bandwidth_share, 4),
        launch=f"{round(constants.kernel_ns)}ns",
        host_time=f"{forward},{backward}",
        source=source,
        measured=device.measured if within is None else "runs",
        within=within,
    )
