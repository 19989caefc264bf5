"""What does each layer of a model cost? Estimated for a GPU, or measured here: of a name, or of a live module.

Of names only what is typed is imported, never what a file names.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ...errors import BadInput
from ...files.machines.accelerators import accelerator
from ...partition.granularity import AUTO, merging
from ...problem import AUTOCAST, Chain
from ...registry import Late
from ...zoo import CORES, ZOO, running_again
from .profiles import Profile
from .variants import degrees, with_variants

if TYPE_CHECKING:
    from ...runtime.model.build.spec import ModelSpec

MICROBATCH = 8  # samples, where nobody says
STEPS = 10
SECONDS = 30.0
HEARERS = ("say", "note", "begun")  # of what is measured, in this process alone
MOST_BESIDE = 256
model_spec, repeatedly = Late("runtime.model.build.spec:ModelSpec"), Late("runtime.engine.reading:repeatedly")


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
    how = _How(gpu, engine, data, device, dtype, optimizer, granularity, blocks, beside, measuring)
    how.check()
    source = _named(model, microbatch) if isinstance(model, str) else _live(model, inputs, loss, microbatch, gpu)
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
        for degree in (x for x in ways["tensor"] or () if x > 1):  # what has no such part is refused at once
            _named(str(model), source.batch, model_spec(str(model), None, degree, 0))
    found = how.made(source, name)
    if not said:
        return found

    def made(named: str, options: str, degree: int) -> Chain:
        if gpu is not None:
            return replace(how, data=None, measuring={}).made(_named(named + options, source.batch), name).chain
        from ...runtime.profiler.beside import measured_together
        from ...runtime.profiler.steps import chosen_device

        if degree == 1:
            part = how.made(_named(named, source.batch), name).chain
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
    spec = model_spec(model, None, together.ranks, together.place)
    spec.exchanges_by(together.exchange)
    beside = 1 if together.place else max(1, how.beside + 1 - together.ranks)
    own = replace(how, beside=beside, measuring={**how.measuring, "together": together})
    return own.made(_named(model, batch, spec), None).chain


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

    @property
    def blocked(self) -> bool:
        """Whether the model's blocks are said to be whole."""
        return self.granularity == "block" or self.blocks is not None

    def check(self) -> None:
        """Raise BadInput for what goes with an estimate alone, or with a measurement, and is said of the other."""
        how = (self.device, self.beside, self.measuring.get("hold", "auto"), self.measuring.get("in_flight", 1))
        if self.gpu is not None and how != ("auto", 1, "auto", 1):
            raise BadInput("--estimate needs no device; leave out --device, --hold, --beside and --in-flight")
        if not 1 <= self.beside <= MOST_BESIDE:
            raise BadInput(f"--beside: {self.beside} isn't a number of processes from 1 to {MOST_BESIDE}")
        if self.gpu is None and self.engine is not None:
            raise BadInput("--engine goes with --estimate")

    def merged(self, chain: Chain) -> Chain:
        """Return ``chain`` with its layers merged, and those that take no time into others."""
        from ...partition.granularity import like_blocks, merge_zero_time

        if chain.edges is None:
            return chain
        merge = merging(self.granularity, self.blocks)
        # blocks first: what takes no time may stand between two
        if self.blocked or (self.granularity == AUTO and like_blocks(chain)):
            return merge_zero_time(merge(chain))
        return merge(merge_zero_time(chain))

    def made(self, source: _Source, name: str | None) -> Profile:
        """Return what each layer of one model costs."""
        from ...runtime.model.autocast import Autocast
        from ...runtime.profiler.estimate import estimate_model
        from ...runtime.profiler.measure import measure_model, measured_again
        from ...runtime.profiler.steps import MeasureOptions, Others, chosen_device, dtype_of
        from ...runtime.training.update.optimizers import optimizer_maker

        merge = merging(self.granularity, self.blocks)  # refuses what is none before anything is measured
        by_names = self.gpu is None and (self.blocked or self.granularity == AUTO)
        batches = source.batches if self.data is None else data_to_read(self.data, source.batch)
        where = "cpu" if self.gpu is not None else chosen_device(self.device)
        if self.beside > 1 and where != "cpu":
            raise BadInput(
                "--beside: processes that share CPUs slow each other; on GPUs leave it out, or say --device cpu"
            )
        half = None if self.dtype is None else dtype_of(self.dtype.removeprefix(AUTOCAST))
        casts = self.dtype is not None and self.dtype.startswith(AUTOCAST)
        again = partial(measured_again, source.elsewhere, source.batch)
        options = MeasureOptions(
            dtype=None if casts else half,
            autocast=Autocast(half, where) if half is not None and casts else None,
            optimizer=optimizer_maker(self.optimizer, 0.0, as_on_gpus=self.gpu is not None),
            device=where,
            read=None if batches is None or self.gpu is not None else repeatedly(batches),
            others=None if self.beside == 1 else Others(self.beside - 1, again),
            merge=merge if by_names else None,
            **{"steps": STEPS, "seconds": SECONDS, **self.measuring},
        )
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        about: dict[str, Any] = {"name": name or source.name, "date": date, "data": batches}
        if self.gpu is None:
            measured = measure_model(source.build, source.batch, options, **about)
        else:
            target = accelerator(self.gpu)
            about["constants"] = target.constants(self.engine)
            measured = estimate_model(source.build, source.batch, target, options, **about)
        return Profile(self.merged(measured.chain), measured=measured)


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
    from ...runtime.model.build.spec import brings_data, builder_of

    spec = part or model_spec(text)
    if not text.startswith(ZOO) and spec.of_zoo:
        raise BadInput(f"MODEL: {text!r} is not of the form zoo:NAME, hf:CONFIG or module:function")
    try:
        build = builder_of(spec)
    except BadInput as error:
        raise error if text.startswith(ZOO) else BadInput(f"MODEL: {error}") from error
    return build, build.data(batch) if brings_data(build) else None
