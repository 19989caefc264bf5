"""What can be asked? Each question's words, once: type, help, unit, default.

The command line makes its options of them (``cli.options``), and Python's keywords are checked by them (:mod:`.door`).
None of the types is left as text; nothing here costs an import, so ``--help`` is instant.
"""

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union, get_args, get_origin

from .. import choices

if TYPE_CHECKING:
    from ..deadline import Deadline
    from ..problem import Platform

LARGEST_SEED = 2**32 - 1  # what every generator of random numbers takes
MOST_RUNS = 10**4  # with drawn durations
LEAST_SIZE = 10**6  # of a number that says bytes, or bytes per second: a smaller one lacks its unit
COMPARED = "data-parallel,gpipe,pipedream,contiguous,auto"
AUTO = "auto"

# --- the questions ----------------------------------------------------------------------------------------------------


class Common(TypedDict, total=False):
    """Which machine, what may be cut, and how much memory training takes: words of every question."""

    gpus: int | str | tuple[int, ...] | None
    gpu: str | None
    mem: int | str | None
    batch: int | str | None
    reserve: int | str | None
    bandwidth: int | str | None
    network: int | str | None
    latency: str | None
    overhead: str | None
    platform: "str | Platform | None"
    blocking_transfers: bool
    granularity: str
    blocks: str | None
    optimizer: choices.Optimizer
    precision: choices.Precision | None
    offload: bool | None
    bytes_per_parameter: int | str | None
    zero: choices.Zero | Literal["any"]
    clipped: bool
    predicted: bool
    checkpointing: choices.Checkpointing | None


class Asked(Common, total=False):
    """A problem: see :func:`.given.problems.problem_of`. All words are optional."""

    weights: choices.Weights | None
    accumulate: int | None
    no_replicas: bool
    vertical_sync: bool


class Searched(TypedDict, total=False):
    """How hard is searched, and what for: words that several questions have."""

    limit: int | None
    effort: choices.Effort | None
    time_limit: "str | Deadline | None"


class Knobs(TypedDict, total=False):
    """What tunes a search."""

    gap: float | None
    solver: choices.Solver
    jobs: int


class Parts(TypedDict, total=False):
    """How many GPUs run each layer together, what runs again inside of layers, and what issues operations."""

    tensor: int | str | None
    sequence_parallel: bool
    selective: bool
    engine: str | None
    experts: int | str | None
    context: int | str | None


class Planning(Asked, Parts, Searched, Knobs, total=False):
    """Which plan is best: see :func:`.planning.plan`."""

    microbatch: int | None
    offload_activations: int | str | None
    for_: choices.TargetName | None
    schedule: choices.PlannedSchedule | None
    algorithm: Literal["auto"] | choices.AlgorithmName
    options: Mapping[str, Any] | None
    split: str | None
    replicas: str | None
    on: str | None
    recompute: str | None
    order: choices.Order
    resume_from: str | None


class Grids(Common, Parts, Searched, total=False):
    """Which grid of stages x pipelines is best: see :func:`.planning.grid`."""

    pipelines: int | None
    microbatches: Sequence[int] | None
    profiles: Sequence[Any]
    layer_overhead: str
    overlap: bool


class Comparing(Asked, Parts, Knobs, total=False):
    """Which algorithm is best: see :func:`.comparing.compare`."""

    algorithms: str | Sequence[str]
    effort: choices.Effort | None
    time_limit: "str | Deadline | None"


# --- what their words say ---------------------------------------------------------------------------------------------

ROWS = f"""
--gpus N|NxN                Number of equal GPUs, or 2x8 for two servers of eight.
--gpu NAME
    GPU name, such as h100; gives memory and links unless --mem and --bandwidth do. See pipeplan list gpus.  [default:
    without --mem the GPU of the profile]
--mem SIZE                  Usable memory of each GPU, such as 16GB, 16G or 16GiB.
--batch N|any
    Samples per update: a multiple of the profile's microbatch. any: 2bw takes the fewest microbatches within 0.1% of
    the best period; flush 4 per GPU; latest the best up to GPUs - 1; stash 1.  [default: 4 microbatches per GPU]
--reserve SIZE|auto
    Memory of each GPU that plans leave free for CUDA, NCCL and fragments. auto: 2GB, or nothing for a profile of a
    CPU.  [default: nothing]
--bandwidth RATE
    Bandwidth between any two GPUs of a server, per direction, such as 12GB/s or 10Gbps.  [default: that of --gpu;
    {choices.DEFAULT_BANDWIDTH}]
--network RATE
    With --gpus 2x8: bandwidth between two GPUs of different servers, per direction.  [default:
    {choices.DEFAULT_NETWORK}]
--latency TIME              Latency of each transfer, such as 5us.  [default: 0]
--overhead TIME             Time that each message costs the GPUs at both ends, in addition.  [default: 0]
--platform FILE             Platform JSON instead of the options above.
--blocking-transfers        Transfers block computation on both GPUs.
--granularity auto|node|block|articulation|N% = auto
    auto: block where most layers belong to blocks that are alike, else node. The others: cut after any layer, between
    items of lists of modules, where one tensor is live, or between neighbours merged up to that share.
--blocks NAMES
    The lists whose items are blocks, such as model.layers or stages.*.blocks; means --granularity block.  [default:
    the outermost ones]
--optimizer = sgd
    Its state takes {", ".join(row.share for row in choices.OPTIMIZERS.values())} times the fp32 weights.
--precision                 [default: fp32, or autocast as profiled]
--offload
    Keep optimizer state in host memory.  [default: no; in grids of pipelines, where that is faster]
--bytes-per-parameter N|N+SHARED
    Weights, gradient and optimizer state as another engine holds them, such as 18, or 6+12 to share the 12 with
    --zero.  [default: by --optimizer and --precision]
--zero 0|1|2|3|any = 0 {{0..3}}
    1: the replicas of a stage share its optimizer state and steps (ZeRO-1). 2: the gradient, too. 3: the weights, too,
    with weights flush, as FSDP does. any: whichever is fastest.
--clipped
    For run --clip-norm: updates wait for the norm of all gradients, with weights flush and 2bw.
--predicted
    For run --delay-correction both: room for predicted weights, where gradients are late and weights fp32.
--checkpointing
    What may be recomputed: nothing, whole stages, or any segments of layers.  [default: segments for auto, else
    stages]
--weights
    Which weight versions are kept.  [default: flush if it takes at most 0.1% longer; else stash or 2bw, the one whose
    gradients are less late if it takes at most 2% longer; flush in grids, with --for and with a --schedule that drains]
--accumulate                Microbatches per update.  [default: 4 per GPU]
--no-replicas               One GPU per stage.
--vertical-sync
    stash, latest: one version of the weights for a microbatch in all stages, which costs versions.
--limit {{1..1000000}}
    Maximum in flight (message-driven: microbatches per pipeline; nf1b: mini-batches).  [default: whatever is fastest]
--effort
    auto: how many candidates to try beyond the exact contiguous plan, high after all of normal; grids: how many local
    moves.  [default: normal]
--time-limit TIME           Stop searching after this long, such as 30s.
-O gap PERCENT {{0..1}}
    auto: stop at a plan this close to the lower bound, such as 1%; 0% never stops early. By this much, or 0.1%, a plan
    of more stages must be shorter.  [default: 0.1%]
-O solver = cbc           Of the integer program that orders non-contiguous stages; highs needs highspy.
-O jobs N = 1 {{1..256}}    Processes that search where one search needn't wait for another; results are the same.
--tensor any|each|N,N,..
    Tensor parallelism: N GPUs of a server run each layer together, in the best of several degrees; any: all degrees
    up to 8 of a named model; with each also one for every stage, where that is better.  [default: all that the profile
    has; of a model 1, but any for a target that runs them]
--sequence-parallel
    With --tensor and a named model: split activations between products along the sequence.  [default: no, but yes with
    any degree for a target that runs them]
--experts any|N,N,..
    Expert parallelism of mixtures: N replicas share the experts of each layer, in the best of several degrees; any:
    4, 8, 16, 32 and 64.  [default: all that the profile has; of a model 1]
--context any|N,N,..
    Context parallelism of long sequences: N GPUs share each one's tokens, in the best of several degrees; any: 2, 4,
    8 and 16.  [default: all that the profile has; of a model 1]
--selective
    Of a zoo's GPT with attention=unfused, or hf: with attn_implementation=eager: also with the core of attention again
    in the backward, of the layers where that is best.
--offload-activations RATE
    Also look for plans whose activations wait in host memory, over a link of so much per GPU and direction, such as
    50GB/s: all that layers save, or what they read, and they run again. With --tensor each also of some stages alone.
--engine NAME|TIME[,TIME]
    Of a model that is estimated: what issues operations: {", ".join(choices.ENGINES)}, of which megatron has its bytes
    per parameter, too; or what one takes the host: 20us, or 20us,10us forward and backward.  [default: eager, or what
    the GPU's file says]
--microbatch N              Samples of a microbatch of a model that is named.  [default: those profiled; of a model 8]
--for (for_)
    Find the best plan that this framework can express, and print what the restriction costs; weights are flush.
--schedule
    One schedule: of those that drain with flush, nf1b or pattern with latest, else pattern. best: with flush, the
    best order of passes that is found on the stages of the plan, or on others on its GPUs.  [default: best of all
    with flush, else the first]
--algorithm = auto        auto is the portfolio: exact contiguous first, then what might beat it.
--option KEY=VALUE (options)
    Of the algorithm, by name.
--resume-from FOLDER
    Resume from a run's checkpoint on --gpus, such as those that are left: with its profile, batch, weights and
    optimizer, on links as in its plan. Of the plans within 2% of the best it is one that moves few bytes.
--split COUNTS|NAMES
    Search nothing: evaluate stages of 4,4,4,5 layers (or 4*3,5), or those that later begin with the layers, or modules,
    named.
--replicas COUNTS           With --split: GPUs of each stage, such as 2,1,1, or a number that all have.  [default: 1]
--on GPUS                   With --split: the GPUs of each stage, such as 0,1/2/3/2.
--recompute all|none|each|LAYERS
    With --split: layers to recompute: whole stages, every single layer, or ranges such as 0-3,8 (each range is one
    segment).  [default: none]
-O order = best           Of the layers of a graph: the best for stages that is found, or the profile's.
--data-parallel auto|N {{1..1000000}} (pipelines)
    Equal pipelines that share every batch; auto: whatever is fastest.
--microbatch N,.. (microbatches)
    Samples of a microbatch: several to choose from, such as 1,2,4.  [default: those profiled; of a model 8]
--microbatch-profile FILE = () (profiles)
    A profile of the same network at another microbatch size; repeatable.
--layer-overhead TIME = 0
    Part of each pass of a layer that doesn't shrink with the microbatch, where sizes are scaled from one profile.
--overlap = no
    Sum gradients in chunks of 4 buckets of 16 million parameters, and step the optimizer on one while the next is
    summed.
--algorithms NAMES = {COMPARED}
    auto, gpipe, or of plan --algorithm.
"""
ROW = re.compile(  # of options that are no words of a question, too
    r"((?:-\w,? )?(?:--)?[a-z][a-z/-]*)(?: ([^ (={]\S*))?(?: = (\S+))?(?: \{(\d+)\.\.(\d+)\})?(?: \((\w+)\))?"
    r"(?: +(.*))?"
)
VALUES: dict[str, Any] = {"no": False, "yes": True, "()": ()}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a question: its ``keyword`` in Python, the ``option`` of the command line, ``help``, the ``unit`` of
    values, a default, and the numbers and ``types`` that it may be. A ``knob`` is said as ``-O name=value`` there."""

    keyword: str
    option: str
    help: str
    unit: str
    default: Any
    least: int
    most: int
    knob: bool
    types: tuple[Any, ...] = ()

    @property
    def unsaid(self) -> Any:
        """What it means where it isn't said."""
        flag = bool in self.types and type(None) not in self.types and self.default is None
        return False if flag else self.default

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The values that it has, where they can be listed."""
        found = tuple(value for each in self.types if get_origin(each) is Literal for value in get_args(each))
        return found or None


def rows_of(text: str) -> list[str]:
    """Return the rows of a text, each with its help, which is in the same line or in those below, behind a blank."""
    found = (re.split(r"\n +", row) for row in re.split(r"\n(?! )", text.strip()))
    return [f"{head}  {' '.join(more)}" if more else head for head, *more in found]


def word_of(row: str) -> Word:
    """Return the word of a row ``--name UNIT = default {least..most} (keyword) help``."""
    parts = ROW.fullmatch(row)
    assert parts is not None, row
    option, unit, default, least, most, keyword, told = parts.groups()
    value: Any = int(default) if default and default.isdigit() and unit != "TIME" else default
    name, bounds = option.removeprefix("-O "), (int(least or 1), int(most or 10**9))
    plain = name.split(", ")[-1].split("/")[0].removeprefix("--").replace("-", "_")
    return Word(keyword or plain, name, told, unit or "", VALUES.get(value, value), *bounds, option.startswith("-O"))


WORDS = {word.keyword: word for word in map(word_of, rows_of(ROWS))}


def words(question: type) -> dict[str, Word]:
    """Return the words of a question by their keywords, in its order: those of several questions first."""
    union: tuple[Any, ...] = (Union, types.UnionType)
    return {
        keyword: replace(WORDS[keyword], types=get_args(kind) if get_origin(kind) in union else (kind,))
        for keyword, kind in question.__annotations__.items()
    }


def defaults(question: type) -> Any:
    """Return a question with what its words mean where they aren't said."""
    return {keyword: word.unsaid for keyword, word in words(question).items()}


def part_of(question: type, said: Any) -> Any:
    """Return the words of ``question`` among all that are said."""
    return {keyword: said[keyword] for keyword in question.__annotations__ if keyword in said}
