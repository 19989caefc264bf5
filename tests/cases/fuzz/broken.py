"""What may be wrong with a file? Its bytes broken, and what its JSON or text says replaced by odd values.

Every function takes a ``random.Random``: same seed, same file.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from typing import Any

DEEP = 100_000
LONG = 100_000
RAW = "\x00raw\x00"  # in a string: what follows stands in the JSON as it is

NUMBERS = [
    0, 1, -1, 2, 3, 7, 100, 1000, -(2**31), 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**12, 10**15, 10**15 + 1,
    10**18, 10**30, 0.0, -0.0, 0.5, 1.0, -1.5, 1e-300, 1e15, 1e18, 1e308,
]  # fmt: skip
TEXTS = [
    "", " ", "0", "-1", "1", "12", "nan", "none", "auto", "any", "contiguous", "flush", "2bw", "stash", "latest",
    "pattern", "nf1b", "message-driven", "F", "B", "SEND_F", "16GB", "0GB", "1B", "-1GB", "1e300GB", "1e999GB", "5",
    "999999PB", "1GB/s", "0GB/s", "1bps", "5us", "1e9s", "1/3", "../../x", "/dev/null", "json:dumps", "%s%n",
    "{0.__class__}", "[bold]x[/bold]", "[/]", "[link=x]", "\x00", "\x1b[31mred", "a\nb", "a\r\tb", "\x7f\x85", "\u2028",
    "\u202egnp.exe", "\U0001f600", "e\u0301" * 20, "\ufeff", "</script><b>", '"', "\\", "'", "x" * 300, "y" * LONG,
    "\ud800",
]  # fmt: skip
WORDS = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "00", "1.", "+1", "0x10", "1_000", "9" * 400,
    "9" * 5000, "True", "None", "undefined", "'a'", "[1,]", "{,}", "{1:2}", '"\\x"', '"\\ud800"', '"a', "//",
    "[" * DEEP, '{"a":' * DEEP, "[" * 900 + "]" * 900, '{"a":1,"a":2}',
]  # fmt: skip
BYTES = [
    b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\x1b[2J", b"\n", b"\r", b"\t", b" ", b"\xc3", b"\xed\xa0\x80",
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"-", b".", b"e9", b"0", b"null", b"true", b"\xe2\x80\xae",
    b"[" * DEEP, b"9" * 400, b"--", b" -- ", b"=", b";", b"node1", b"\tnode2 -- node1\n",
]  # fmt: skip
_TOKEN = re.compile(rb"-?[0-9][0-9.eE+-]*|[A-Za-z_][A-Za-z_0-9]*")


def broken_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` after one to four random changes of its bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(CHANGES)(rng, data)
    return data


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 1, 2, 5, 30, 300, 3000)))


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _remove(rng: random.Random, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    return data[:start] + data[stop:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    return data[:stop] + data[start:stop] * rng.choice((1, 1, 2, 100)) + data[stop:]


def _move(rng: random.Random, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    rest = data[:start] + data[stop:]
    at = rng.randrange(len(rest) + 1)
    return rest[:at] + data[start:stop] + rest[at:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(BYTES) + data[at:]


def _token(rng: random.Random, data: bytes) -> bytes:
    """Replace a number or a word by another one."""
    found = list(_TOKEN.finditer(data))
    if not found:
        return data
    match = rng.choice(found)
    other = rng.choice((_text(rng.choice(NUMBERS)).encode(), rng.choice(WORDS).encode(), rng.choice(found)[0]))
    return data[: match.start()] + other + data[match.end() :]


def _line(rng: random.Random, data: bytes) -> bytes:
    """Remove, repeat or move a line."""
    lines = data.split(b"\n")
    line = lines.pop(rng.randrange(len(lines)))
    for _ in range(rng.choice((0, 1, 2))):
        lines.insert(rng.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


def _encoding(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\xef\xbb\xbf" * 2)) + data
    return data.decode(errors="replace").encode(
        rng.choice(("utf-16", "utf-16-be", "utf-32", "utf-7", "cp037")), errors="replace"
    )


def _other(rng: random.Random, data: bytes) -> bytes:
    """Replace the whole file."""
    return rng.choice(
        (
            b"", b" ", b"\n\n", b"\x00" * 4096, b"{}", b"[]", b"null", b"0", b'""', b"[[]]", rng.randbytes(300),
            data * 2,
            gzip.compress(data, mtime=0), b"[" * DEEP, b'{"a":' * DEEP, b'"' + b"a" * 10**6 + b'"',
            data.replace(b"\n", b"\r\n"),
            b"%PDF-1.4", b"PK\x03\x04", b"\x80\x04\x95", b"node1 -- " + b"a" * 10**5, data.swapcase(), data[::-1],
        )
    )  # fmt: skip


CHANGES = (
    _flip, _flip, _cut, _remove, _remove, _repeat, _move, _insert, _insert, _token, _token, _line, _encoding, _other,
)  # fmt: skip


def odd_json(rng: random.Random, document: Any) -> str:
    """Return the JSON of ``document`` after one to three random changes of what it says."""
    document = json.loads(json.dumps(document))
    change = rng.choice((_odd, _odd, _near))
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        document = change(rng, document)
    return _text(document)


def odd_text(rng: random.Random, data: bytes) -> bytes:
    """Return the text ``data`` after one to three random changes of its numbers, words and lines."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice((_token, _token, _token, _line))(rng, data)
    return data


def _near(rng: random.Random, document: Any) -> Any:
    """Change one number to a plausible one, so that what is read is as often good as not."""
    numbers = [(inside, key) for inside, key in _leaves(document) if type(inside[key]) is int]
    if numbers:
        inside, key = rng.choice(numbers)
        old = inside[key]
        inside[key] = rng.choice((old + 1, old - 1, old + rng.randint(0, 9), old * 2, old // 2, old * 10, 0, 1))
    return document


def _leaves(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what holds each leaf, and its key there."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if isinstance(value, (dict, list)):
            yield from _leaves(value)
        else:
            yield document, key


def _odd(rng: random.Random, document: Any) -> Any:
    places = list(_places(document, ()))
    if not places:
        return _value(rng, document, document)
    depth = rng.choice(sorted({len(place) for place in places}))  # else nearly all are leaves
    *parents, last = rng.choice([place for place in places if len(place) == depth])
    inside = document
    for key in parents:
        inside = inside[key]
    chance = rng.random()
    if chance < 0.1:
        del inside[last]
    elif chance < 0.2 and isinstance(inside, list):
        inside[:] = rng.choice(
            ([*inside, inside[last]], inside[::-1], inside * 2, inside * 100, [], [inside[:]], inside[:last])
        )
    elif chance < 0.2:
        inside[rng.choice(("unknown", "", "format", "\x1b[1m", f"{last} ", f"{last}".upper()))] = inside[last]
    elif chance < 0.25 and isinstance(inside, dict):  # a key twice
        inside[last] = f"{RAW}{json.dumps(inside[last])}, {json.dumps(last)}: {json.dumps(rng.choice(NUMBERS))}"
    else:
        inside[last] = _value(rng, document, inside[last])
    return document


def _value(rng: random.Random, document: Any, old: Any) -> Any:
    """Return what stands in the place of ``old``: near it, odd, of another type, or from elsewhere in the file."""
    chance = rng.random()
    if chance < 0.35 and isinstance(old, (int, float)) and not isinstance(old, bool):
        return rng.choice((old + 1, old - 1, -old, old * 2, old // 2, old * 1000, old * 10**9, float(old), str(old)))
    if chance < 0.35 and isinstance(old, str) and RAW not in old:
        return rng.choice((old + "0", old[:-1], old.upper(), old * 2, old + "\x07", old.replace("1", "9"), f"-{old}"))
    if chance < 0.35 and isinstance(old, list) and old:
        return rng.choice((old[1:], old[:-1], old + old, old[::-1], old[0], [*old, None], {"0": old[0]}))
    if chance < 0.5:
        return rng.choice(NUMBERS)
    if chance < 0.65:
        return rng.choice(TEXTS)
    if chance < 0.75:
        return RAW + rng.choice(WORDS)
    if chance < 0.85:
        *parents, last = rng.choice(list(_places(document, ())) or [()]) or [None]
        for key in parents:
            document = document[key]
        return None if last is None else json.loads(json.dumps(document[last]))
    return rng.choice((None, True, False, [], {}, [[]], [0], [0, 1], [1, 0], [0] * 1000, {"a": 1}, [None]))


def _places(document: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside ``document``."""
    children = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in children:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _text(document: Any) -> str:
    """Return JSON in which what begins with :data:`RAW` stands as it is."""
    text = json.dumps(document)
    mark = json.dumps(RAW)[1:-1]
    if mark not in text:
        return text
    return re.sub(f'"{re.escape(mark)}((?:[^"\\\\]|\\\\.)*)"', lambda match: json.loads(f'"{match[1]}"'), text)
