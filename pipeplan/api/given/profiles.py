"""What does a network cost, layer by layer? A profile from a file, from a model by its name, or from a live module."""

from __future__ import annotations

import datetime
import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ...errors import BadInput
from ...files.machines.accelerators import accelerator
from ...files.profiles import PREFIX, located, profile_text
from ...files.profiles import read_profile as read_chain
from ...files.text import write_text
from ...names import shown
from ...partition.granularity import AUTO, merging
from ...problem import AUTOCAST, Chain, Layer
from ...registry import Late
from ...units import format_bytes, format_ns
from ...zoo import CORES, HUGGING_FACE, ZOO, running_again
from ..asked import Parts
from .variants import degrees, with_variants

if TYPE_CHECKING:
    from ...runtime.model.build.spec import ModelSpec
    from ...runtime.profiler.measure import MeasuredModel

MICROBATCH = 8  # samples, where nobody says
STEPS = 10
SECONDS = 30.0
HEARERS = ("say", "note", "begun")  # of what is measured, in this process alone
MOST_BESIDE = 256
HALF = {
    "fp32": "float32",
    "mixed": "bfloat16",
    "autocast": f"{AUTOCAST}bfloat16",
}  # in what a model is estimated that is planned for in a precision
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, repr=False)
class Profile:
    """A network's layers with their times and bytes; ``chain`` is the whole of it, as planning takes it.

    ``measured`` has how steady the times were, of a profile that was made here. ``assumptions`` say in words what
    wasn't said, ``notes`` what its author's module gave up to be run by layers.
    """

    chain: Chain
    assumptions: tuple[str, ...] = ()
    measured: MeasuredModel | None = None

    @property
    def name(self) -> str:
        """The network's name."""
        return self.chain.name

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, the loss last: times in ns and bytes, of one microbatch."""
        return self.chain.layers

    @property
    def microbatch(self) -> int:
        """Samples that run together."""
        return self.chain.microbatch

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of it should know."""
        return () if self.measured is None else self.measured.notes

    def __len__(self) -> int:
        return len(self.chain)

    def merged(self, granularity: str = "block", blocks: str | None = None) -> Profile:
        """Return the profile with layers merged as ``--granularity`` and ``--blocks`` say it."""
        return replace(self, chain=merging(granularity, blocks)(self.chain))

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically; BadInput where nothing can be written."""
        write_text(str(path), profile_text(self.chain))

    def __repr__(self) -> str:
        sums = self.chain.sums
        return (
            f"<Profile {shown(self.name)}: {len(self)} layers, microbatch {self.microbatch}, "
            f"forward {format_ns(int(sums.forward_ns[-1]))}, backward {format_ns(int(sums.backward_ns[-1]))}>"
        )

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><td style='text-align:left'>{html.escape(shown(x.name))}</td><td>{format_ns(x.forward_ns)}</td>"
            f"<td>{format_ns(x.backward_ns)}</td><td>{format_bytes(x.weight_bytes)}</td>"
            f"<td>{format_bytes(x.output_bytes)}</td></tr>"
            for x in self.layers
        )
        head = "".join(f"<th>{name}</th>" for name in ("layer", "forward", "backward", "weights", "output"))
        return f"<p>{html.escape(repr(self)[1:-1])}</p><table><tr>{head}</tr>{''.join(rows)}</table>"


def read_profile(path: str | Path) -> Profile:
    """Return the profile in a file: this project's JSON, or PipeDream's ``graph.txt``; ``-`` is standard input.

    ``"example:resnet50"`` is one that comes with the program.
    """
    chain = read_chain(str(path))
    unsaid = chain.microbatch == 1 and not located(str(path)).endswith(".json")
    said = "the profile doesn't say its microbatch size; throughput counts microbatches"
    return Profile(chain, (said,) if unsaid else ())


def as_profile(
    given: Profile | Chain | str | Path,
    gpu: str | None = None,
    optimizer: str = "sgd",
    precision: str | None = None,
    microbatch: int | None = None,
    **parted: Unpack[Parts],
) -> Profile:
    """Return what is given as a profile: one, a chain, a file, or a model by its name, estimated for ``gpu``.

    BadInput for a model without a GPU, or a ``microbatch`` of a profile that has its own.
    """
    if isinstance(given, str) and is_name(given):
        if gpu is None:
            raise BadInput(
                f"{shown(given)}: a model is planned for by an estimate: name its GPU with --gpu (pipeplan list has "
                f"them), or measure it first: pipeplan profile {shown(given)} -o profile.json"
            )
        dtype = HALF[precision or "fp32"]
        if precision == "mixed" and dtype not in accelerator(gpu).tflops:  # older GPUs have the other half
            dtype = "float16"
        found = profile(
            given,
            gpu=gpu,
            microbatch=microbatch,
            optimizer=optimizer,
            dtype=dtype,
            **parted,
        )
        named = accelerator(gpu)
        what = f"layers as estimated for {named.name}, not measured, microbatches of {found.microbatch} in {dtype}"
        what += "" if parted.get("engine") is None else f", operations issued as --engine {parted['engine']} says"
        return replace(found, assumptions=(what, named.doubt))
    if isinstance(given, Profile | Chain):
        found = Profile(given) if isinstance(given, Chain) else given
    else:
        found = read_profile(given)
    if microbatch not in (None, found.microbatch):
        raise BadInput(f"--microbatch: the profile's microbatches have {found.microbatch} samples, not {microbatch}")
    return found


def is_name(given: object) -> bool:
    """Whether it names a model, as ``zoo:NAME``, ``hf:CONFIG`` or ``module:function``, and no file."""
    if not isinstance(given, str) or given.startswith(PREFIX):
        return False
    if given.startswith((ZOO, HUGGING_FACE)):
        return True
    return FUNCTION.fullmatch(given) is not None and not Path(given).exists()


def profile(
    model: Any,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    *,
    gpu: str | None = None,
    engine: str | None = None,
    microbatch: int | None = None,
    data: Any = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: str | None = None,
    optimizer: str = "sgd",
    granularity: str = AUTO,
    blocks: str | None = None,
    name: str | None = None,
    beside: int = 1,
    tensor: str | int | None = None,
    sequence_parallel: bool = False,
    selective: bool = False,
    experts: str | int | None = None,
    context: str | int | None = None,
    **measuring: Any,
) -> Profile:
    """Return what each layer of a model costs: estimated for ``gpu`` (``"a100"``), or measured here on ``device``.

    Of an estimate, ``engine`` says what an operation takes the host: ``"20us"``, ``"20us,10us"`` forward and backward,
    or what issues it, ``"eager"``, ``"compiled"``, ``"graphs"`` or ``"megatron"``.

    ``model`` is a module with an example of its ``inputs`` and a ``loss(output, target)`` (None where it returns its
    loss), or a name: ``"zoo:gpt2-xl"``, ``"hf:CONFIG"``, ``"module:function"`` of a build function. A live module stays
    as it is. ``microbatch`` are samples: of a live module those of its inputs, by default the length of the first
    tensor's first dimension. ``data(index, seed)``, or a loader, gives inputs and targets to measure with. ``dtype`` is
    one of torch's, by name; with ``"autocast-bfloat16"`` the model runs as it is under ``torch.autocast``. ``beside``
    processes compute at once on a CPU, as in a run: all but one of them train the model meanwhile. ``measuring`` are
    fields of :class:`..runtime.profiler.steps.MeasureOptions`. Of a model by its name ``tensor`` (``"1,2,4,8"``, or of
    an estimate ``"any"`` for those that the model has) are degrees of tensor parallelism, each a variant of the layers
    as one of so many ranks has them, measured as so many processes train, and with ``selective`` there are variants,
    too, whose backwards run the core of attention again. Of an estimate alone ``sequence_parallel`` also spreads what
    is between products along the sequence, and there are variants with ``experts`` (``"1,8"``, or ``"any"``) that so
    many ranks share, and with ``context`` those of a part of each sequence.
    Needs torch; BadInput or CodeFailed in one sentence for a model that cannot be run by layers.
    """
    asked = {"tensor": tensor, "experts": experts, "context": context}
    said = [name for name, value in (*asked.items(), ("selective", selective or None)) if value is not None]
    if said and granularity == AUTO:
        granularity = "block"  # of which parts have the same
    _refuse(gpu, engine, device, beside, measuring)
    source = _named(model, microbatch) if isinstance(model, str) else _live(model, inputs, loss, microbatch, gpu)
    how = _How(gpu, engine, data, device, dtype, optimizer, granularity, blocks, beside, measuring)
    unmeasured = [x for x in said if x not in ("tensor", "selective")] + ["sequence_parallel"] * sequence_parallel
    if said and (not isinstance(model, str) or (gpu is None and unmeasured)):
        which = (unmeasured or said)[0].replace("_", "-")
        raise BadInput(f"--{which}: parts of layers are estimated, of models by their name; say --estimate")
    if selective and running_again(str(model)) is None:
        of_zoo, of_others = CORES
        raise BadInput(
            f"--selective: goes with a zoo's GPT that says {of_zoo}, or hf: with {of_others}; fused attention keeps "
            "nothing to save"
        )
    ways = {name: degrees(1 if value is None else value, f"--{name}") for name, value in asked.items()}
    if gpu is None and None in ways.values():
        raise BadInput("--tensor any: which degrees are there to be measured? Say them, such as 1,2")
    if gpu is None and said:
        from ...runtime.model.build.spec import ModelSpec

        for degree in (x for x in ways["tensor"] or () if x > 1):  # what has no such part is refused at once
            _named(str(model), source.batch, ModelSpec(str(model), None, degree, 0))
    found = _made(source, name, how)
    if not said:
        return found

    def made(named: str, options: str, degree: int) -> Chain:
        if gpu is not None:
            return _made(_named(named + options, source.batch), name, replace(how, data=None, measuring={})).chain
        from ...runtime.profiler.beside import measured_together
        from ...runtime.profiler.steps import chosen_device

        if degree == 1:
            part = _made(_named(named, source.batch), name, how).chain
        else:
            if "say" in measuring:
                measuring["say"](f"measuring as {degree} processes run each layer together")
            more = {key: value for key, value in measuring.items() if key not in HEARERS}
            measure = partial(_measured_part, named, source.batch, replace(how, measuring=more))
            part = measured_together(measure, degree, "cpu" if chosen_device(device) == "cpu" else "cuda")
        layers, reading = list(part.layers), found.chain.read_in_passes_ns - part.read_in_passes_ns
        for i in (0, -1):  # a profile has one time of reading
            layers[i] = replace(layers[i], forward_ns=layers[i].forward_ns + reading)
        return replace(part, layers=tuple(layers))

    chain = with_variants(found.chain, model, source.build, ways, sequence_parallel, selective, made)
    return replace(found, chain=chain)


def _measured_part(model: str, batch: int, how: _How, together: Any) -> Chain:
    """Return what its part of each layer of a named model costs this process, one of those that run it ``together``."""
    from ...runtime.model.build.spec import ModelSpec

    spec = ModelSpec(model, None, together.ranks, together.place)
    spec.exchanges_by(together.exchange)
    beside = 1 if together.place else max(1, how.beside + 1 - together.ranks)
    own = replace(how, beside=beside, measuring={**how.measuring, "together": together})
    return _made(_named(model, batch, spec), None, own).chain


@dataclass(frozen=True, slots=True)
class _How:
    """How models are profiled: as the arguments of :func:`profile` say."""

    gpu: str | None
    engine: str | None
    data: Any
    device: Literal["auto", "cpu", "cuda"]
    dtype: str | None
    optimizer: str
    granularity: str
    blocks: str | None
    beside: int
    measuring: dict[str, Any]


def _made(source: _Source, name: str | None, how: _How) -> Profile:
    """Return what each layer of one model costs."""
    from ...runtime.model.autocast import Autocast
    from ...runtime.profiler.estimate import estimate_model
    from ...runtime.profiler.measure import measure_model, measured_again
    from ...runtime.profiler.steps import MeasureOptions, Others, chosen_device, dtype_of
    from ...runtime.training.update.optimizers import optimizer_maker

    merge, by_names = merging(how.granularity, how.blocks), how.granularity in (AUTO, "block") or how.blocks is not None
    batches = source.batches if how.data is None else data_to_read(how.data, source.batch)
    where = "cpu" if how.gpu is not None else chosen_device(how.device)
    if how.beside > 1 and where != "cpu":
        raise BadInput("--beside: processes that share CPUs slow each other; on GPUs leave it out, or say --device cpu")
    half = None if how.dtype is None else dtype_of(how.dtype.removeprefix(AUTOCAST))
    casts = how.dtype is not None and how.dtype.startswith(AUTOCAST)
    again = partial(measured_again, source.elsewhere, source.batch)
    options = MeasureOptions(
        dtype=None if casts else half,
        autocast=Autocast(half, where) if half is not None and casts else None,
        optimizer=optimizer_maker(how.optimizer, 0.0, as_on_gpus=how.gpu is not None),
        device=where,
        read=None if batches is None or how.gpu is not None else Late("runtime.engine.reading:repeatedly")(batches),
        others=None if how.beside == 1 else Others(how.beside - 1, again),
        merge=merge if by_names and how.gpu is None else None,
        **{"steps": STEPS, "seconds": SECONDS, **how.measuring},
    )
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    about: dict[str, Any] = {"name": name or source.name, "date": date, "data": batches}
    if how.gpu is None:
        measured = measure_model(source.build, source.batch, options, **about)
    else:
        target = accelerator(how.gpu)
        about["constants"] = target.constants(how.engine)
        measured = estimate_model(source.build, source.batch, target, options, **about)
    return Profile(_merged(measured.chain, merge, how.granularity, how.blocks), measured=measured)


@dataclass(frozen=True, slots=True)
class _Source:
    """A model to be profiled: what builds it here, and what does in other processes, in microbatches of ``batch``
    samples; ``batches`` is its own data."""

    name: str
    batch: int
    build: Callable[..., Any]
    elsewhere: Callable[[], Any]
    batches: Callable[[int, int], Any] | None = None


def _named(model: str, microbatch: int | None, part: ModelSpec | None = None) -> _Source:
    batch = microbatch or MICROBATCH
    build, batches = named_model(model, batch, part)
    name = model.removeprefix(ZOO).partition(",tensor_plan=")[0]
    return _Source(name, batch, build, partial(build_named, model, batch), batches)


def _live(model: Any, inputs: Any, loss: Callable[..., Any] | None, microbatch: int | None, gpu: str | None) -> _Source:
    from ...runtime.profiler.live import builder_of_live, samples_in

    build = builder_of_live(model, inputs, loss, fake=gpu is not None)
    elsewhere = partial(builder_of_live, model, inputs, loss, fake=False)
    return _Source(type(model).__name__, microbatch or samples_in(inputs), build, elsewhere)


def _refuse(gpu: str | None, engine: str | None, device: str, beside: int, measuring: Mapping[str, Any]) -> None:
    """Raise BadInput for what goes with an estimate alone, or with a measurement, and is said of the other."""
    how = (device, beside, measuring.get("hold", "auto"), measuring.get("in_flight", 1))
    if gpu is not None and how != ("auto", 1, "auto", 1):
        raise BadInput("--estimate needs no device; leave out --device, --hold, --beside and --in-flight")
    if not 1 <= beside <= MOST_BESIDE:
        raise BadInput(f"--beside: {beside} isn't a number of processes from 1 to {MOST_BESIDE}")
    if gpu is None and engine is not None:
        raise BadInput("--engine goes with --estimate")


def _merged(chain: Chain, merge: Callable[[Chain], Chain], granularity: str, blocks: str | None) -> Chain:
    """Return ``chain`` with its layers merged, and those that take no time into others."""
    from ...partition.granularity import like_blocks, merge_zero_time

    if chain.edges is None:
        return chain
    # blocks first: what takes no time may stand between two
    blocked = granularity == "block" or blocks is not None or (granularity == AUTO and like_blocks(chain))
    return merge_zero_time(merge(chain)) if blocked else merge(merge_zero_time(chain))


# --- models by their names: only what is typed is imported, never what a file names -----------------------------------


def data_to_read(data: Any, batch: int) -> Callable[[int, int], Any]:
    """Return ``data``, or what it names, as data(index, seed); that of a loader gives ``batch`` samples.

    Names are looked up from the working folder too.
    """
    from ...runtime.data.loader import data_from
    from ...runtime.model.build.spec import named_data

    try:
        return named_data(data, batch) if isinstance(data, str) else data_from(data, "data", batch)
    except BadInput as error:
        raise BadInput(f"--data: {error}") from error


def build_named(text: str, batch: int) -> Callable[..., Any]:
    """Return the build function of the model that ``text`` names, in another process too."""
    return named_model(text, batch)[0]


def named_model(
    text: str, batch: int, part: ModelSpec | None = None
) -> tuple[Callable[..., Any], Callable[[int, int], Any] | None]:
    """Return (build, data) of the model that ``text`` names, or of a ``part``; data is None for a user's function."""
    from ...runtime.model.build.spec import ModelSpec, brings_data, builder_of

    spec = part or ModelSpec(text)
    if not text.startswith(ZOO) and spec.of_zoo:
        raise BadInput(f"MODEL: {text!r} is not of the form zoo:NAME, hf:CONFIG or module:function")
    try:
        build = builder_of(spec)
    except BadInput as error:
        raise error if text.startswith(ZOO) else BadInput(f"MODEL: {error}") from error
    return build, build.data(batch) if brings_data(build) else None
