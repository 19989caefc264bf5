"""What can be named, and what is taken where nothing is named? Words that a command's ``--help`` shows, and no more.

What they stand for has rows in tables of its own (``schedule.kinds``, ``partition``, ``check.targets``), which a test
holds against these. Here they cost no import, so that help comes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

ScheduleKind = Literal[
    "flush", "nf1b", "message-driven", "1f1b", "interleaved", "gpipe", "breadth-first", "zb1p", "zb2p",
    "interleaved-zb", "zbv", "v-half", "v-min", "dualpipev", "written", "pattern",
]  # fmt: skip
Weights = Literal["flush", "2bw", "2bw-uniform", "stash", "latest"]
DRAINED: Final = "flush"  # the weights of what is asked to drain
PLANNED = [kind for kind in get_args(ScheduleKind) if kind != "written"]  # what plans are made for
BEST: Final = "best"  # of all orders that are found, instead of a schedule's
AlgorithmName = Literal["contiguous", "madpipe", "madpipe-paper", "pipedream", "piper", "balance", "data-parallel"]
TargetName = Literal["megatron", "torchtitan", "deepspeed", "torch"]
FORMS = "megatron", "megatron-bridge", "torchtitan", "deepspeed", "torch-split", "torch-csv"  # of plans for them
Precision = Literal["fp32", "mixed", "autocast"]
Zero = Literal[0, 1, 2, 3]
DelayCorrection = Literal["none", "sc", "predict", "both"]  # spike compensation, weight prediction
Checkpointing = Literal["none", "stages", "segments"]
Effort = Literal["quick", "normal", "high"]
Order = Literal["best", "given"]
Solver = Literal["cbc", "highs"]


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """An optimizer that plans can have: ``kinds`` are the classes of ``torch.optim`` that keep so much state, of which
    plans take the first with these ``options``.

    ``eighths`` is the state over the fp32 weights, in eighths: of those that step whole matrices the most it may be (a
    plan whose weights need more is refused), and ``kept`` gives the numbers for a weight of a shape. ``megatron`` is
    Megatron-LM's name.
    """

    kinds: tuple[str, ...]
    eighths: int
    kept: Callable[[Sequence[int]], int] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    megatron: str | None = None

    @property
    def elementwise(self) -> bool:
        """Whether it steps each number of a weight by itself."""
        return self.kept is None

    @property
    def share(self) -> str:
        """The state over the fp32 weights, in words."""
        whole, rest = divmod(self.eighths, 8)
        return " ".join(filter(None, [str(whole) if whole or not rest else "", f"{rest}/8" if rest else ""]))


def _factored(shape: Sequence[int]) -> int:
    return prod(shape) // shape[-1] + prod(shape) // shape[-2] if len(shape) > 1 else prod(shape)


def _whole_or_twice(shape: Sequence[int]) -> int:
    return prod(shape) if len(shape) == 2 else 2 * prod(shape)


OPTIMIZERS: Final = MappingProxyType(
    {
        "sgd": OptimizerRow(("SGD",), 0),
        "momentum": OptimizerRow(("SGD",), 8, options=(("momentum", 0.9),), megatron="sgd"),
        "adam": OptimizerRow(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"), 16, megatron="adam"),
        "rmsprop": OptimizerRow(("RMSprop", "Adagrad", "ASGD"), 8),
        "adafactor": OptimizerRow(("Adafactor",), 1, kept=_factored),
        "muon": OptimizerRow(("Muon",), 9, kept=_whole_or_twice),
    }
)
BY_MATRIX: Final = tuple(name for name, row in OPTIMIZERS.items() if row.kept is not None)
if TYPE_CHECKING:
    Optimizer = str
    PlannedSchedule = ScheduleKind | Literal["best"]
else:
    Optimizer = Literal[tuple(OPTIMIZERS)]
    PlannedSchedule = Literal[(*PLANNED, BEST)]

ENGINES = {  # host time of an operation, forward and backward
    "eager": "20us,10us",  # Python and the dispatcher; the autograd engine alone
    "compiled": "3us",  # an operation's part of fused kernels
    "graphs": "0us",  # the host launches a whole graph
    "megatron": "28us,56us",  # as fits 317 iterations of vTrain's GPTs on Megatron-DeepSpeed best, kernels as they are
}
USUAL_ENGINE = "eager"
DEFAULT_BANDWIDTH = "12GB/s"
DEFAULT_NETWORK = "100Gbps"
