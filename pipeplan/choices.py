"""What can be named, and what is taken where nothing is named? Words that a command's ``--help`` shows, and no more.

What they stand for has rows in tables of its own (``schedule.kinds``, ``partition``, ``check.targets``), which a test
holds against these. Here they cost no import, so that help comes at once.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

ScheduleKind = Literal[
    "flush",
    "nf1b",
    "message-driven",
    "1f1b",
    "interleaved",
    "gpipe",
    "breadth-first",
    "zb1p",
    "zb2p",
    "interleaved-zb",
    "zbv",
    "v-half",
    "v-min",
    "v-limit",
    "dualpipev",
    "written",
    "pattern",
]
PLANNED = [kind for kind in get_args(ScheduleKind) if kind != "written"]  # what plans are made for
BEST: Final = "best"  # of all orders that are found, instead of a schedule's
AlgorithmName = Literal["contiguous", "madpipe", "madpipe-paper", "pipedream", "balance", "data-parallel"]
TargetName = Literal["megatron", "torchtitan", "deepspeed", "torch"]

ENGINES = {  # host time of an operation, forward and backward
    "eager": "20us,10us",  # Python and the dispatcher; the autograd engine alone
    "compiled": "3us",  # an operation's part of fused kernels
    "graphs": "0us",  # the host launches a whole graph
}
USUAL_ENGINE = "eager"
DEFAULT_BANDWIDTH = "12GB/s"
DEFAULT_NETWORK = "100Gbps"
