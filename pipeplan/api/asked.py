"""What can be asked? Each question's words, once: type, help, unit, default.

The command line makes its options of them (``cli.options``), and Python's keywords are checked by them (:mod:`.door`).
Types stand in the annotations, so none of them is left as text; nothing here costs an import, so ``--help`` is instant.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Union, get_args, get_origin

from ..choices import (
    BEST,
    DEFAULT_BANDWIDTH,
    DEFAULT_NETWORK,
    OPTIMIZERS,
    AlgorithmName,
    Checkpointing,
    Effort,
    Optimizer,
    Order,
    PlannedSchedule,
    Precision,
    Solver,
    TargetName,
    Weights,
    Zero,
)

if TYPE_CHECKING:
    from ..deadline import Deadline
    from ..problem import Platform

LARGEST_SEED = 2**32 - 1  # what every generator of random numbers takes
MOST_RUNS = 10**4  # with drawn durations
LEAST_SIZE = 10**6  # of a number that says bytes, or bytes per second: a smaller one lacks its unit
COMPARED = "data-parallel,gpipe,pipedream,contiguous,auto"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Word:
    """How a word is said and shown: ``help``, the ``unit`` of its value, and the numbers that it may be.

    ``option`` is the command line's name where that isn't Python's. A ``knob`` is said as ``-O name=value`` there.
    """

    help: str
    unit: str = ""
    default: Any = None
    least: float = 1
    most: float = 10**9
    option: str = ""
    knob: bool = False

    def named(self, keyword: str) -> str:
        """Return the command line's name for a keyword of Python."""
        return self.option or keyword.rstrip("_").replace("_", "-")


class Common(TypedDict, total=False):
    """Which machine, what may be cut, and how much memory training takes: words of every question."""

    gpus: Annotated[
        int | str | tuple[int, ...] | None, Word("Number of equal GPUs, or 2x8 for two servers of eight.", "N|NxN")
    ]
    gpu: Annotated[
        str | None,
        Word(
            "GPU name, such as h100; gives memory and links unless --mem and --bandwidth do. See pipeplan list "
            "gpus.  [default: without --mem the GPU of the profile]",
            "NAME",
        ),
    ]
    mem: Annotated[int | str | None, Word("Usable memory of each GPU, such as 16GB, 16G or 16GiB.", "SIZE")]
    batch: Annotated[
        int | str | None,
        Word(
            "Samples per update: a multiple of the profile's microbatch. any: 2bw takes the fewest microbatches within "
            "0.1% of the best period; flush 4 per GPU; latest the best up to GPUs - 1; stash 1.  [default: 4 "
            "microbatches per GPU]",
            "N|any",
        ),
    ]
    reserve: Annotated[
        int | str | None,
        Word(
            "Memory of each GPU that plans leave free for CUDA, NCCL and fragments. auto: 2GB, or nothing for a "
            "profile of a CPU.  [default: nothing]",
            "SIZE|auto",
        ),
    ]
    bandwidth: Annotated[
        int | str | None,
        Word(
            "Bandwidth between any two GPUs of a server, per direction, such as 12GB/s or 10Gbps.  [default: "
            "that of --gpu; "
            f"{DEFAULT_BANDWIDTH}]",
            "RATE",
        ),
    ]
    network: Annotated[
        int | str | None,
        Word(
            "With --gpus 2x8: bandwidth between two GPUs of different servers, per direction.  [default: "
            f"{DEFAULT_NETWORK}]",
            "RATE",
        ),
    ]
    latency: Annotated[str | None, Word("Latency of each transfer, such as 5us.  [default: 0]", "TIME")]
    overhead: Annotated[
        str | None, Word("Time that each message costs the GPUs at both ends, in addition.  [default: 0]", "TIME")
    ]
    platform: Annotated["str | Platform | None", Word("Platform JSON instead of the options above.", "FILE")]
    blocking_transfers: Annotated[bool, Word("Transfers block computation on both GPUs.")]
    granularity: Annotated[
        str,
        Word(
            "auto: block where most layers belong to blocks that are alike, else node. The others: cut after any "
            "layer, between items of lists of modules, where one tensor is live, or between neighbours merged up to "
            "that share.",
            "auto|node|block|articulation|N%",
            AUTO,
        ),
    ]
    blocks: Annotated[
        str | None,
        Word(
            "The lists whose items are blocks, such as model.layers or stages.*.blocks; means --granularity block.  "
            "[default: the outermost ones]",
            "NAMES",
        ),
    ]
    optimizer: Annotated[
        Optimizer,
        Word(
            f"Its state takes {', '.join(row.share for row in OPTIMIZERS.values())} times the fp32 weights.",
            default="sgd",
        ),
    ]
    precision: Annotated[Precision | None, Word("[default: fp32, or autocast as profiled]")]
    offload: Annotated[
        bool | None,
        Word("Keep optimizer state in host memory.  [default: no; in grids of pipelines, where that is faster]"),
    ]
    bytes_per_parameter: Annotated[
        int | str | None,
        Word(
            "Weights, gradient and optimizer state as another engine holds them, such as 18, or 6+12 to share the 12 "
            "with --zero 1.  [default: by --optimizer and --precision]",
            "N|N+SHARED",
        ),
    ]
    zero: Annotated[
        Zero,
        Word("1: the replicas of a stage share its optimizer state and steps (ZeRO-1).", default=0, least=0, most=1),
    ]
    clipped: Annotated[
        bool, Word("For run --clip-norm: updates wait for the norm of all gradients, with weights flush and 2bw.")
    ]
    checkpointing: Annotated[
        Checkpointing | None,
        Word(
            "What may be recomputed: nothing, whole stages, or any segments of layers.  [default: segments for auto, "
            "else stages]"
        ),
    ]


class Asked(Common, total=False):
    """A problem: see :func:`.problems.problem_of`. All words are optional."""

    weights: Annotated[
        Weights | None,
        Word(
            "Which weight versions are kept.  [default: stash or 2bw, the one whose gradients are less late if "
            "it takes at most 2% longer; flush in grids, with --for and with a --schedule that drains]"
        ),
    ]
    accumulate: Annotated[int | None, Word("Microbatches per update.  [default: 4 per GPU]")]
    no_replicas: Annotated[bool, Word("One GPU per stage.")]
    vertical_sync: Annotated[
        bool, Word("stash, latest: one version of the weights for a microbatch in all stages, which costs versions.")
    ]


class Searched(TypedDict, total=False):
    """How hard is searched, and what for: words that several questions have."""

    limit: Annotated[
        int | None,
        Word(
            "Maximum in flight (message-driven: microbatches per pipeline; nf1b: mini-batches; v-limit: chunk "
            "activations per GPU).  [default: whatever is fastest]",
            most=10**6,
        ),
    ]
    effort: Annotated[
        Effort | None,
        Word(
            "auto: how many candidates to try beyond the exact contiguous plan, high after all of normal; grids: how "
            "many local moves.  [default: normal]"
        ),
    ]
    time_limit: Annotated["str | Deadline | None", Word("Stop searching after this long, such as 30s.", "TIME")]


class Knobs(TypedDict, total=False):
    """What tunes a search."""

    gap: Annotated[
        float | None,
        Word(
            "auto: stop at a plan this close to the lower bound, such as 1%; 0% never stops early.  [default: 0.1%]",
            "PERCENT",
            least=0,
            most=1,
            knob=True,
        ),
    ]
    solver: Annotated[
        Solver,
        Word(
            "Of the integer program that orders non-contiguous stages; highs needs highspy.", default="cbc", knob=True
        ),
    ]
    jobs: Annotated[
        int,
        Word(
            "Processes that search where one search needn't wait for another; results are the same.",
            "N",
            1,
            most=256,
            knob=True,
        ),
    ]


class Parts(TypedDict, total=False):
    """How many GPUs run each layer together."""

    tensor: Annotated[
        int | str | None,
        Word(
            "Tensor parallelism: N GPUs of a server run each layer together, in the best of several degrees; "
            "any: all degrees up to 8 of a named model.  [default: all that the profile has; of a model 1, "
            "but any for a target that runs them]",
            "any|N,N,..",
        ),
    ]
    sequence_parallel: Annotated[
        bool,
        Word("With --tensor and a named model: split activations between products along the sequence."),
    ]


class Planning(Asked, Parts, Searched, Knobs, total=False):
    """Which plan is best: see :func:`.planning.plan`."""

    microbatch: Annotated[
        int | None,
        Word("Samples of a microbatch of a model that is named.  [default: those profiled; of a model 8]", "N"),
    ]
    for_: Annotated[
        TargetName | None,
        Word(
            "Find the best plan that this framework can express, and print what the restriction costs; weights "
            "are flush."
        ),
    ]
    schedule: Annotated[
        PlannedSchedule | None,
        Word(
            "One schedule: of those that drain with flush, nf1b or pattern with latest, else pattern. best: with "
            "flush, the best order of passes that is found on the stages of the plan, or on others on its GPUs.  "
            "[default: best of all with flush, else the first]"
        ),
    ]
    algorithm: Annotated[
        Literal["auto"] | AlgorithmName,
        Word("auto is the portfolio: exact contiguous first, then what might beat it.", default=AUTO),
    ]
    options: Annotated[Mapping[str, Any] | None, Word("Of the algorithm, by name.", "KEY=VALUE", option="option")]
    robust: Annotated[
        float | None,
        Word(
            "Minimise the 95th percentile over runs whose durations vary by this much, such as 5%; also print "
            "what the fastest plan loses then.",
            "PERCENT",
            least=0,
            most=1,
        ),
    ]
    split: Annotated[
        str | None,
        Word(
            "Search nothing: evaluate stages of 4,4,4,5 layers, or those that later begin with the layers, or modules, "
            "named.",
            "COUNTS|NAMES",
        ),
    ]
    replicas: Annotated[
        str | None, Word("With --split: GPUs of each stage, such as 2,1,1.  [default: 1 each]", "COUNTS")
    ]
    on: Annotated[str | None, Word("With --split: the GPUs of each stage, such as 0,1/2/3/2.", "GPUS")]
    recompute: Annotated[
        str | None,
        Word(
            "With --split: layers to recompute: whole stages, every single layer, or ranges such as 0-3,8 (each "
            "range is one segment).  [default: none]",
            "all|none|each|LAYERS",
        ),
    ]
    order: Annotated[
        Order,
        Word("Of the layers of a graph: the best for stages that is found, or the profile's.", default=BEST, knob=True),
    ]
    seed: Annotated[int, Word("Of --robust.", "N", 0, 0, LARGEST_SEED, knob=True)]
    runs: Annotated[int, Word("Of --robust.", "N", 20, most=MOST_RUNS, knob=True)]


class Grids(Common, Parts, Searched, total=False):
    """Which grid of stages x pipelines is best: see :func:`.planning.grid`."""

    pipelines: Annotated[
        int | None,
        Word(
            "Equal pipelines that share every batch; auto: whatever is fastest.", "auto|N", most=10**6,
            option="data-parallel",
        ),
    ]  # fmt: skip
    microbatches: Annotated[
        Sequence[int] | None,
        Word(
            "Samples of a microbatch: several to choose from, such as 1,2,4.  [default: those profiled; of a model 8]",
            "N,..",
            option="microbatch",
        ),
    ]
    profiles: Annotated[
        Sequence[Any],
        Word(
            "A profile of the same network at another microbatch size; repeatable.",
            "FILE",
            (),
            option="microbatch-profile",
        ),
    ]
    layer_overhead: Annotated[
        str,
        Word(
            "Part of each pass of a layer that doesn't shrink with the microbatch, where sizes are scaled from one "
            "profile.",
            "TIME",
            "0",
        ),
    ]
    overlap: Annotated[
        bool,
        Word(
            "Sum gradients in chunks of 4 buckets of 16 million parameters, and step the optimizer on one while the "
            "next is summed.",
            default=False,
        ),
    ]


class Comparing(Asked, Parts, Knobs, total=False):
    """Which algorithm is best: see :func:`.comparing.compare`."""

    algorithms: Annotated[str | Sequence[str], Word("auto, gpipe, or of plan --algorithm.", "NAMES", COMPARED)]
    effort: Annotated[Effort | None, Word("How many candidates auto tries.  [default: normal]")]
    time_limit: Annotated["str | Deadline | None", Word("Stop after this long, such as 600s.", "TIME")]


@dataclass(frozen=True, slots=True)
class Said:
    """A word of a question: its keyword in Python, what it is, and the types that it may have."""

    keyword: str
    word: Word
    types: tuple[Any, ...]

    @property
    def default(self) -> Any:
        """What it means where it isn't said."""
        flag = bool in self.types and type(None) not in self.types and self.word.default is None
        return False if flag else self.word.default

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The values that it has, where they can be listed."""
        found = tuple(value for each in self.types if get_origin(each) is Literal for value in get_args(each))
        return found or None


def words(question: type) -> dict[str, Said]:
    """Return the words of a question by their keywords, in its order: those of several questions first."""
    found: dict[str, Said] = {}
    for keyword, annotation in question.__annotations__.items():
        kind, (word,) = annotation.__origin__, annotation.__metadata__
        parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        found[keyword] = Said(keyword, word, parts)
    return found


def defaults(question: type) -> Any:
    """Return a question with what its words mean where they aren't said."""
    return {keyword: said.default for keyword, said in words(question).items()}


def part_of(question: type, said: Any) -> Any:
    """Return the words of ``question`` among all that are said."""
    return {keyword: said[keyword] for keyword in question.__annotations__ if keyword in said}
