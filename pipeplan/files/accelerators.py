"""What can a named GPU do? Data-sheet figures from a table, or from a user's own file, to estimate profiles from."""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from ..errors import BadInput
from ..units import parse_bandwidth, parse_bytes, parse_time
from .forms import read_json
from .text import read_text


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device: memory and its bandwidth, the link to its peers per direction, dense peaks by type in 1e12 flop/s.

    ``tf32`` is what convolutions of float32 run in, as torch has it by default; products of float32 matrices don't.
    ``launch`` is the least time of an operation.
    """

    name: str
    memory: str
    bandwidth: str
    tflops: dict[str, float]
    link: str | None = None
    launch: str = "5us"

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes."""
        return parse_bytes(self.memory, "$.memory")

    @property
    def bandwidth_bytes(self) -> int:
        """Bytes per second from and to the memory."""
        return parse_bandwidth(self.bandwidth, "$.bandwidth")

    @property
    def launch_ns(self) -> int:
        """The least time of one operation."""
        return parse_time(self.launch, "$.launch")

    def peak(self, dtype: str, convolution: bool = False) -> float:
        """Return flop/s for numbers of ``dtype``; BadInput when the table has none."""
        if convolution and dtype == "float32":
            dtype = "tf32" if "tf32" in self.tflops else dtype
        if dtype not in self.tflops:
            raise BadInput(f"{self.name}: no peak is known for {dtype}, only for {', '.join(self.tflops)}")
        return self.tflops[dtype] * 1e12


@cache
def accelerators() -> dict[str, Accelerator]:
    """Return the table by short names."""
    text = resources.files(__package__).joinpath("accelerators.json").read_text(encoding="utf-8")
    return msgspec.json.decode(text, type=dict[str, Accelerator])


def accelerator(text: str) -> Accelerator:
    """Return the accelerator of a short name, or of a JSON file of the same form as one entry of the table."""
    known = accelerators()
    if text.lower() in known:
        return known[text.lower()]
    if not text.endswith(".json"):
        raise BadInput(f"no accelerator is named {text!r}; known are {', '.join(known)}, or FILE.json")
    found = read_json(read_text(text), Accelerator, text)
    if not found.tflops or any(peak <= 0 for peak in found.tflops.values()):
        raise BadInput(f"{text}: $.tflops must have positive peaks")
    try:
        _ = found.memory_bytes, found.bandwidth_bytes, found.launch_ns  # refuse wrong units here, not later
    except BadInput as error:
        raise BadInput(f"{text}: {error}") from None
    return found
