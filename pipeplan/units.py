"""Quantities as people write them (``16GB``, ``10Gbps``, ``3.2ms``) to exact integers and back.

Sizes are bytes, bandwidths bytes per second, times nanoseconds. ``GB`` is 1e9 and ``GiB`` is 2**30, as on every
data sheet. A bare number is refused because nobody can tell what it counts; only ``0`` needs no unit.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import prod

from .errors import BadInput
from .names import shown

_PREFIX = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
SIZES = {f"{prefix}B": factor for prefix, factor in (_PREFIX | _BINARY).items()}
BANDWIDTHS = {f"{size}/s": Fraction(factor) for size, factor in SIZES.items()} | {
    f"{prefix}bps": Fraction(factor, 8) for prefix, factor in _PREFIX.items()
}
TIMES = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}

SHORT = {prefix: factor for prefix, factor in (_PREFIX | _BINARY).items() if prefix}  # 16G for 16GB

_QUANTITY = re.compile(
    r"\s*(?P<number>(?:[0-9]{1,60}(?:\.[0-9]{0,60})?|\.[0-9]{1,60})(?:[eE][+-]?[0-9]{1,3})?)\s*(?P<unit>[A-Za-z/]*)\s*"
)
MOST_COUNT = 4096  # GPUs that any command plans for
LONGEST_WAIT = 10**12  # of a message, in ns: a quarter of an hour
LARGEST = 10**18  # above it, sums of int64 would overflow; an exabyte and thirty years are enough


def parse_bytes(text: str, place: str = "size") -> int:
    """Return the bytes that ``text`` such as ``16GB`` or ``1.5GiB`` names; BadInput names ``place``."""
    return _parse(text, SIZES | SHORT, place, "16GB or 16GiB")


def parse_bandwidth(text: str, place: str = "bandwidth") -> int:
    """Return the bytes per second that ``text`` such as ``12GB/s`` or ``10Gbps`` (bits) names."""
    value = _parse(text, BANDWIDTHS, place, "12GB/s or 10Gbps")
    if value == 0:
        raise BadInput(f"{place}: {text!r} must be positive")
    return value


def parse_time(text: str, place: str = "time") -> int:
    """Return the nanoseconds that ``text`` such as ``3.2ms`` or ``5us`` names, rounded half to even."""
    return _parse(text, TIMES, place, "3.2ms or 5us")


def parse_wait(text: str, place: str) -> int:
    """Return the nanoseconds that ``text`` names, of what every message takes; BadInput for hours, too."""
    found = parse_time(text, place)
    if found > LONGEST_WAIT:
        raise BadInput(f"{place}: {text!r} is longer than a message takes (at most {LONGEST_WAIT // 10**9}s)")
    return found


def parse_counts(text: str, where: str) -> list[int]:
    """Return the counts that ``2,4-6`` says, in that order; BadInput names ``where``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,8})(?:-([0-9]{1,8}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if first < 1 or last > MOST_COUNT:
            raise BadInput(f"{where}: {part[:40]!r} is neither a count nor a range such as 2-8, up to {MOST_COUNT}")
        counts += range(first, last + 1)
    if not counts:
        raise BadInput(f"{where}: {text!r} names no count")
    return counts


def gpu_counts(text: str, place: str = "--gpus") -> tuple[int, ...]:
    """Return the GPUs of one server, and of several the number of servers behind it, that ``8`` or ``2x8`` says."""
    found = re.fullmatch(r"(?:([0-9]{1,7})[xX])?([0-9]{1,7})", text)
    counts = (int(found[2]), *([int(found[1])] if found[1] else [])) if found else (0,)
    if not 1 <= prod(counts) <= MOST_COUNT:
        what = f"write 8, or 2x8 for two servers of eight, up to {MOST_COUNT}"
        raise BadInput(f"{place}: '{shown(text, 40)}' isn't a GPU count: {what}")
    return counts


def ms_to_ns(milliseconds: str | float | Fraction) -> int:
    """Return nanoseconds for a decimal count of milliseconds, rounded half to even (exactly, from its decimal text)."""
    exact = milliseconds if isinstance(milliseconds, Fraction) else Fraction(str(milliseconds))
    return round(exact * 10**6)


def format_bytes(count: int) -> str:
    """Return bytes in the unit that fits (TB, GB from a tenth of it on, MB, bytes below 0.01 MB), two decimals at most.

    What is a whole number of its unit has none: ``40 GB``.
    """
    size = abs(count)
    if size < 10**4:
        return f"{count} B" if count else "0 MB"
    unit = "TB" if size >= 10**12 else "GB" if size >= 10**8 else "MB"
    whole, rest = divmod(size, SIZES[unit])
    return f"{'-' if count < 0 else ''}{whole} {unit}" if not rest else f"{count / SIZES[unit]:.2f} {unit}"


def format_bandwidth(bytes_per_second: int) -> str:
    """Return a bandwidth in GB/s (1e9 bytes per second)."""
    return f"{bytes_per_second / 1e9:g} GB/s"


def format_ns(nanoseconds: int | float) -> str:
    """Return a duration in ms with three decimals, in s from ten of them on, in ns below one thousandth of a ms."""
    if abs(nanoseconds) >= 10**10:
        return f"{nanoseconds / 1e9:.3f} s"
    if 0 < abs(nanoseconds) < 10**3:
        return f"{nanoseconds:.0f} ns"
    return f"{nanoseconds / 1e6:.3f} ms"


def gpu_name(device: int, width: int = 1) -> str:
    """Return what a device is called that is one GPU, or a group of so many: ``GPU 3``, ``GPUs 8-15``."""
    return f"GPU {device}" if width == 1 else f"GPUs {device * width}-{(device + 1) * width - 1}"


def _parse(text: str, units: dict[str, int] | dict[str, Fraction], place: str, example: str) -> int:
    match = _QUANTITY.fullmatch(text)
    text = f"'{shown(text)}'"
    if match is None:
        raise BadInput(f"{place}: {text} is not a non-negative number with a unit, such as {example}")
    number, unit = Fraction(match["number"]), match["unit"]
    if not unit and number == 0:
        return 0
    if not unit:
        raise BadInput(f"{place}: {text} has no unit; write {example}")
    factor = units.get(unit)
    if factor is None:
        raise BadInput(f"{place}: {unit!r} in {text} is not a known unit; write {example}")
    value = round(number * factor)
    if value > LARGEST:
        raise BadInput(f"{place}: {text} is too large (at most {LARGEST:.0e} in base units)")
    return value


def exact_bytes(count: int) -> str:
    """Return bytes in the largest decimal or binary unit that divides them, so that parsing gives them back."""
    return _exact(count, SIZES)


def exact_bandwidth(bytes_per_second: int) -> str:
    """Return a bandwidth in bytes per second so that parsing gives it back."""
    return f"{exact_bytes(bytes_per_second)}/s"


def exact_time(nanoseconds: int) -> str:
    """Return a time in the largest unit that divides it, so that parsing gives it back."""
    return _exact(nanoseconds, TIMES)


def _exact(value: int, units: dict[str, int]) -> str:
    fitting = [unit for unit, factor in units.items() if factor == 1 or (value and value % factor == 0)]
    unit = max(fitting, key=units.__getitem__)
    return f"{value // units[unit]}{unit}"
