"""What state is in a file, or in a folder of them? Tensors by name, read when they are used; and written one by one.

Files are torch's own (``torch.save`` of a state_dict) or in the safetensors format (huggingface.co/docs/safetensors):
eight bytes with the length of a header, the header, which is JSON and says of every tensor its type, shape and place,
and the tensors. A state in several files has an index, ``*.index.json``, whose ``weight_map`` says which name is where.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
import torch
from torch import Tensor

from ....errors import BadInput
from ....files.forms import read_json
from ....files.text import read_text, regular
from ....names import shown
from ..network import kind_of

SAFETENSORS: Final = ".safetensors"
INDEX: Final = ".index.json"
NAMES: Final = ("model", "pytorch_model")  # how a state in a folder is called first
LENGTH: Final = 8  # bytes of a header's length
LONGEST: Final = 10**8  # bytes of a header
WORDS: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
Size = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
TYPES: Final = {word: dtype for dtype, word in WORDS.items()}


def read_state(path: str | Path) -> dict[str, Any]:
    """Return the state in a file, an index of files, or a folder; its tensors lie in the files until they are used.

    BadInput names a file that is none, or not whole.
    """
    path = Path(path)
    if os.path.isdir(path):  # pathlib's raises for a name that is too long
        return read_state(_in_folder(path))
    if path.name.endswith(INDEX):
        return _indexed(path)
    return _in_file(path)


def _in_folder(folder: Path) -> Path:
    """Return the file in ``folder`` that has its state, or its index."""
    for name in NAMES:
        for end in (SAFETENSORS + INDEX, SAFETENSORS, f".bin{INDEX}", ".bin"):
            if (folder / f"{name}{end}").exists():
                return folder / f"{name}{end}"
    found = sorted(folder.glob(f"*{INDEX}")) or sorted(folder.glob(f"*{SAFETENSORS}")) or sorted(folder.glob("*.pt"))
    if len(found) == 1:
        return found[0]
    what = f"has {', '.join(x.name for x in found[:3])}" if found else f"has neither *{INDEX} nor *{SAFETENSORS}"
    raise BadInput(f"{folder}: {what}; name the file to load")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """A tensor in a header: its type, shape, and where it begins and ends among the tensors, in bytes."""

    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]


def _indexed(path: Path) -> dict[str, Any]:
    places = read_json(read_text(str(path)), _Index, str(path)).weight_map
    files = dict.fromkeys(places.values())
    odd = next((x for x in files if Path(x).name != x or x == ".." or x.endswith(INDEX)), None)
    if odd is not None:
        raise BadInput(
            f"{path}: isn't an index of a state: it names '{shown(odd)}', which isn't a file of tensors beside it"
        )
    states = {name: _in_file(path.parent / name) for name in files}
    for name, file in places.items():
        if name not in states[file]:
            raise BadInput(f"{path}: lists {name!r} in {file}, which doesn't have it")
    return {name: states[file][name] for name, file in places.items()}


def _in_file(path: Path) -> dict[str, Any]:
    size = regular(path).st_size
    try:
        return _read_safetensors(path, size) if path.suffix == SAFETENSORS else _read_torch(path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        sizes = _record_sizes(path) if zipfile.is_zipfile(path) else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what becomes of an old file
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=sizes is not None)
    except (OSError, BadInput):
        raise
    except Exception as error:  # whatever unpickling another file raises
        raise BadInput(f"{path}: cannot be loaded: {loaders_words(error)}") from error
    if not isinstance(state, dict):
        raise BadInput(f"{path}: isn't a state_dict but {kind_of(state)}")
    if sizes is not None and _storage_sizes(state) - sizes:
        raise BadInput(f"{path}: has tensors that are larger than what the file holds of them")
    return state


def _record_sizes(path: Path) -> Counter[int]:
    """Return how many entries of each size a zip file has; BadInput where torch would read one wrong."""
    with zipfile.ZipFile(path) as file:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
            raise BadInput(f"{path}: has been compressed since torch.save wrote it; torch doesn't read it right")
        return Counter(entry.file_size for entry in file.infolist())


def _storage_sizes(state: dict[str, Any]) -> Counter[int]:
    """Return how many pieces of memory of each size the tensors of a state take; each is an entry of its file."""
    tensors = (x for x in state.values() if isinstance(x, Tensor) and x.layout == torch.strided)
    storages = (x.untyped_storage() for x in tensors)
    return Counter({x.data_ptr(): x.nbytes() for x in storages if x.device.type == "cpu" and x.nbytes()}.values())


def loaders_words(error: BaseException) -> str:
    """Return what torch's loader says, without its advice to take whatever comes."""
    lines = [x.strip() for x in str(error).splitlines()]
    said = [x.removeprefix("WeightsUnpickler error:").strip() for x in lines if x.startswith("WeightsUnpickler error:")]
    said += [x for x in lines if "weights_only" not in x and not x.startswith("Weights only")]
    return f"{type(error).__name__}: {next(filter(None, said), '')}"


def _read_safetensors(path: Path, size: int) -> dict[str, Tensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if not 1 < length <= min(LONGEST, size - LENGTH):
            raise BadInput(f"{path}: isn't a safetensors file, or not whole: a header of {length} bytes in {size}")
        header = file.read(length)
    whole: Any = torch.UntypedStorage.from_file(str(path), False, size)
    found: dict[str, Tensor] = {}
    try:
        entries = read_json(header.decode(), dict[str, msgspec.Raw], "its header")
        entries.pop("__metadata__", None)
        spans: list[tuple[int, int]] = []
        for name, raw in entries.items():
            entry = msgspec.json.decode(raw, type=_Entry)
            found[name] = _tensor(whole, LENGTH + length, entry)
            spans.append(entry.data_offsets)
        if any(stop > start for (_, stop), (start, _) in pairwise(sorted(x for x in spans if x[1] > x[0]))):
            raise ValueError("two tensors lie in the same bytes")
    except (ValueError, BadInput) as error:
        raise BadInput(f"{path}: isn't a safetensors file, or not whole: {error}") from error
    return found


def _tensor(whole: torch.UntypedStorage, data: int, entry: _Entry) -> Tensor:
    """Return the tensor of one ``entry`` of a header; the tensors begin at byte ``data`` of the file ``whole``."""
    if entry.dtype not in TYPES:
        raise ValueError(f"type {shown(entry.dtype)!r} is unknown")
    dtype, shape = TYPES[entry.dtype], entry.shape
    start, stop = (data + x for x in entry.data_offsets)
    size = math.prod(shape) * dtype.itemsize
    if not start <= stop <= whole.nbytes() or stop - start != size:
        raise ValueError(f"bytes {start} to {stop} of {whole.nbytes()} are said to be {entry.dtype} {shape}")
    there = torch.empty(0, dtype=torch.uint8).set_(whole, start, (size,), (1,))
    if start % dtype.itemsize:
        there = there.clone()
    return there.view(dtype).reshape(shape)


class SafetensorsWriter:
    """Writes a state to ``file``, of which ``specs`` has the shapes and types by name; each tensor when it comes."""

    def __init__(self, file: IO[bytes], specs: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._file, self._at, end = file, {}, 0
        for name, (shape, dtype) in sorted(specs.items(), key=lambda spec: (-spec[1][1].itemsize, spec[0])):
            if dtype not in WORDS:
                raise BadInput(f"{name}: safetensors files have no type for {dtype}; save to a file of torch's (.pt)")
            self._at[name], start = end, end
            end += math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": WORDS[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH)
        file.write(len(text).to_bytes(LENGTH, "little") + text)
        self._data = LENGTH + len(text)
        self._size = self._data + end

    def put(self, names: Iterable[str], tensor: Tensor) -> None:
        """Write ``tensor`` under ``names``."""
        for name in names:
            self._file.seek(self._data + self._at[name])
            self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._file.seek(self._size)
