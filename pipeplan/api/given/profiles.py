"""What does a network cost, layer by layer? A profile from a file, from a model by its name, or from a live module."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ...errors import BadInput
from ...files.machines.accelerators import accelerator
from ...files.profiles import PREFIX, located, profile_text
from ...files.profiles import read_profile as read_chain
from ...files.text import write_text
from ...names import shown
from ...partition.granularity import merging
from ...problem import AUTOCAST, Chain, Layer
from ...registry import Late
from ...units import format_bytes, format_ns
from ...zoo import HUGGING_FACE, ZOO
from ..asked import Parts

if TYPE_CHECKING:
    from ...runtime.profiler.measure import MeasuredModel

HALF = {
    "fp32": "float32",
    "mixed": "bfloat16",
    "autocast": f"{AUTOCAST}bfloat16",
}  # in what a model is estimated that is planned for in a precision
profile: Callable[..., Profile] = Late("api.given.profiling:profile")
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
        found = profile(given, gpu=gpu, microbatch=microbatch, optimizer=optimizer, dtype=dtype, **parted)
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
