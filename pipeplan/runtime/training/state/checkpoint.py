"""Which checkpoints does a folder have, and which of them are good?

One folder for each, ``step-00000040``, which appears under its name only when everything is in it: a file of every
rank's, and ``run.json`` with the size and the checksum of each, and of itself. What is not as it was written is damaged
and passed over; nothing of it is used. Whatever is in such a folder, nothing outside of it is read, and no file is run.

Names that begin with a dot are of something under way: ``.partial`` is being written, ``.removed`` is going, and
``.replaced`` makes room for another checkpoint of as many updates. One run at a time writes: it has the :mod:`.lock`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, Final, Literal

import msgspec

from ....errors import BadInput, RunFailed
from ....files.forms import json_text, read_json
from ....files.text import read_text
from ....units import format_bytes
from ...lowering.lowered_run import Position

FORMAT: Final = "pipeplan-checkpoint/2"
ABOUT: Final = "run.json"
PLAN: Final = "plan.json"  # beside it, where the plan has a bound, as those in files have
LARGEST_ABOUT: Final = 2**24  # bytes; it has about 80 for each rank
CHUNK: Final = 2**20  # bytes that are read at once
SLOWEST: Final = 2 * 10**7  # bytes/s at which a checkpoint is expected to be read at least
NAMED: Final = 3  # damaged checkpoints in one message
_NAME = re.compile(r"step-\d{8,}")

Unreadable = Callable[[Path], str | None]
Crc32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file was when it was written: its size, and the CRC-32 of all its bytes."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=10**18)]
    crc32: Crc32


class _Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    microbatch: Annotated[int, msgspec.Meta(ge=1, le=10**15)]


class _About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``run.json`` says; ``crc32`` is of all the rest."""

    format: Literal["pipeplan-checkpoint/2"]
    position: _Position
    model: str
    seed: int
    files: dict[str, FileSum]
    crc32: Crc32 = 0

    def sum(self) -> int:
        """Return the CRC-32 of everything but itself."""
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, crc32=0)))


class _Format(msgspec.Struct):
    format: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: its folder, where training stood, the run that wrote it, and its files, one for each rank."""

    path: str
    position: Position
    model: str
    seed: int
    files: Mapping[str, FileSum]


class Peers:
    """The processes that look for a checkpoint together, this one among them: the ``rank``-th of ``world``, here the
    only one."""

    rank, world = 0, 1

    def gathered(self, mine: str | None, timeout_s: float = 0.0) -> Sequence[str | None]:
        """Return what each gave; wait ``timeout_s`` longer for them than for an answer."""
        return [mine]


def file_of(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"rank-{rank:05d}.pt"


def folder_of(step: int) -> str:
    """Return the name of the checkpoint after ``step`` updates."""
    return f"step-{step:08d}"


# --- which is good --------------------------------------------------------------------------------------------------


def newest(
    folder: str | Path,
    passed_over: Callable[[str], None] | None = None,
    peers: Peers | None = None,
    unreadable: Unreadable | None = None,
) -> Checkpoint | None:
    """Return the good checkpoint in ``folder`` with the most updates; None if there are none at all.

    All ``peers`` ask together: the first one lists the folder, each reads its share of the files whole. ``passed_over``
    hears on the first of every damaged one that has more updates; ``unreadable`` says why a file that is as it was
    written is of no use, None if it is. BadInput when there are checkpoints and all of them are damaged.
    """
    peers = peers or Peers()
    listed = peers.gathered(" ".join(_steps(Path(folder))) if peers.rank == 0 else None)[0]
    damage: list[str] = []
    for name in reversed((listed or "").split()):
        checkpoint, wrong = _examined(Path(folder) / name, peers, unreadable)
        if checkpoint is not None:
            if passed_over is not None and peers.rank == 0:
                for words in damage:
                    passed_over(words)
            return checkpoint
        damage.append(wrong)
    if damage:
        more = f"; and {len(damage) - NAMED} more" if len(damage) > NAMED else ""
        raise BadInput(f"{folder}: no checkpoint is good: {'; '.join(damage[:NAMED])}{more}")
    return None


def plan_of(folder: str) -> str:
    """Return the file of the plan by which the newest checkpoint in ``folder``, or that at ``folder``, was trained;
    BadInput where there is none."""
    place = Path(folder)
    found = [place] if _NAME.fullmatch(place.name) else [place / name for name in reversed(_steps(place))]
    named = next((path / PLAN for path in found if (path / PLAN).is_file()), None)
    if named is None:
        raise BadInput(f"checkpoint: {folder} has none with the plan of its run")
    return str(named)


def _steps(folder: Path) -> list[str]:
    """Return the names of what looks like checkpoints in ``folder``, good or not, by their updates."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"checkpoint: {folder} cannot be read: {error.strerror}") from error
    return sorted(names, key=lambda name: (len(name), name))


def _examined(path: Path, peers: Peers, unreadable: Unreadable | None) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint at ``path`` if all peers find it good, or what is wrong with it."""
    checkpoint, wrong = None, None
    try:
        checkpoint = about(path)
    except BadInput as error:
        wrong = str(error)
    found = next(filter(None, peers.gathered(wrong)), None)
    if found is not None or checkpoint is None:
        return None, found or ""
    share = list(checkpoint.files)[peers.rank :: peers.world]
    size = sum(file.bytes for file in checkpoint.files.values())
    found = next(filter(None, peers.gathered(_damage(checkpoint, share, unreadable), size / SLOWEST)), None)
    return (None, found) if found else (checkpoint, "")


def about(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``, whose files are there in their sizes; BadInput says what is wrong."""
    if not _is_folder(path):
        raise BadInput(f"{path}: isn't a folder")
    place = path / ABOUT
    size = _size(place)
    if size > LARGEST_ABOUT:
        raise BadInput(f"{place}: has {format_bytes(size)}; it is never larger than {format_bytes(LARGEST_ABOUT)}")
    text = read_text(str(place), LARGEST_ABOUT)
    version = read_json(text, _Format, str(place)).format
    if version != FORMAT:
        raise BadInput(f"{place}: is of format {version[:40]!r}; this version reads {FORMAT}")
    said = read_json(text, _About, str(place))
    if said.crc32 != said.sum():
        raise BadInput(f"{place}: its checksum is {said.sum():08x}, not {said.crc32:08x} as when it was written")
    if path.name != folder_of(said.position.step):
        raise BadInput(f"{place}: is of update {said.position.step}")
    if said.seed.bit_length() > 64:
        raise BadInput(f"{place}: seed: has {said.seed.bit_length()} bits")
    if not said.files or set(said.files) != {file_of(rank) for rank in range(len(said.files))}:
        raise BadInput(f"{place}: files: has other names than those of ranks, from {file_of(0)} on")
    for name, file in said.files.items():
        size = _size(path / name)
        if size != file.bytes:
            raise BadInput(f"{path / name}: has {size:,} bytes, not {file.bytes:,} as when it was written")
    position = Position(said.position.step, said.position.microbatch)
    return Checkpoint(str(path), position, said.model, said.seed, said.files)


def _is_folder(path: Path) -> bool:
    """Whether ``path`` itself, and not what it links to, is a folder."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _size(path: Path) -> int:
    """Return the size of a file; BadInput for anything but a regular one, which alone is safe to open."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise BadInput(f"{path}: {os.strerror(error.errno or 0).lower()}") from error
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{path}: isn't a regular file")
    return found.st_size


def crc_of(path: Path, leaving: Event | None = None) -> int:
    """Return the CRC-32 of a file, or of a part when nobody wants it any more."""
    crc = 0
    with path.open("rb") as file:
        while (chunk := file.read(CHUNK)) and not (leaving is not None and leaving.is_set()):
            crc = zlib.crc32(chunk, crc)
    return crc


def _damage(checkpoint: Checkpoint, names: Sequence[str], unreadable: Unreadable | None) -> str | None:
    """Return what is wrong with the first damaged one among the files ``names``; None if all are as written."""
    leaving = Event()

    def wrong(name: str) -> str | None:
        path, written = Path(checkpoint.path, name), checkpoint.files[name].crc32
        try:
            crc = crc_of(path, leaving)
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror}"
        if crc != written:
            return f"{path}: its checksum is {crc:08x}, not {written:08x} as when it was written"
        return None if unreadable is None else unreadable(path)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # reading and summing let other threads run
        try:
            return next(filter(None, pool.map(wrong, names)), None)
        finally:
            leaving.set()


# --- the folder -----------------------------------------------------------------------------------------------------


def tidy(folder: Path) -> None:
    """Remove from ``folder`` what runs left that were killed while they wrote or removed a checkpoint.

    One that was to be replaced, but whose successor didn't come, gets its name back.
    """
    for path in folder.glob(".step-*"):
        name = path.name.split(".")[1]
        if path.suffix == ".replaced" and not os.path.lexists(folder / name):
            with suppress(OSError):
                path.rename(folder / name)
        else:
            _remove(path)


def begin(folder: Path, step: int) -> Path:
    """Return a new folder to write the checkpoint after ``step`` updates to. No rank of another run knows its name."""
    tidy(folder)
    partial = _hidden(folder, folder_of(step), "partial")
    partial.mkdir(parents=True)
    return partial


def finish(
    partial: Path, position: Position, model: str, seed: int, files: Sequence[FileSum], plan: str | None = None
) -> None:
    """Let what is in ``partial``, each rank's file, appear as a checkpoint, once it is sure to survive a power cut;
    with the text of its ``plan``, if there is one.

    RunFailed when one isn't there as it was written, such as in a folder that the ranks don't share.
    """
    for rank, written in enumerate(files):
        try:
            size = _size(partial / file_of(rank))
        except BadInput as error:
            raise RunFailed(f"the file of rank {rank} isn't there, so it has another folder: {error}") from error
        if size != written.bytes:
            raise RunFailed(f"{partial / file_of(rank)}: has {size:,} bytes, not {written.bytes:,} as written")
    if plan is not None:
        (partial / PLAN).write_text(plan, encoding="utf-8")
    place = _Position(position.step, position.microbatch)
    said = _About(FORMAT, place, model, seed, {file_of(rank): file for rank, file in enumerate(files)})
    with (partial / ABOUT).open("w", encoding="utf-8") as file:
        file.write(json_text(msgspec.structs.replace(said, crc32=said.sum())))
        file.flush()
        os.fsync(file.fileno())
    _flush(partial)
    final = partial.with_name(folder_of(position.step))
    before = _hidden(partial.parent, final.name, "replaced")
    if os.path.lexists(final):  # a damaged one, or another run's
        os.replace(final, before)
    os.replace(partial, final)
    _flush(final.parent)
    _remove(before)


def remove_older(folder: Path, step: int, keep: int, good: Collection[int]) -> None:
    """Remove the checkpoints in ``folder`` that are older than the newest ``keep`` of those known to be ``good``.

    Those of more updates than ``step`` are of another run and stay; so do those that aren't whole. Each is renamed
    first, so that none is ever half there.
    """
    kept = 0
    for name in reversed(_steps(folder)):
        try:
            found = about(folder / name).position.step
        except BadInput:
            continue
        if found > step:
            continue
        if kept >= keep:
            going = _hidden(folder, name, "removed")
            os.replace(folder / name, going)
            _remove(going)
        kept += found in good


def _hidden(folder: Path, name: str, suffix: str) -> Path:
    return folder / f".{name}.{secrets.token_hex(4)}.{suffix}"


def _remove(path: Path) -> None:
    """Remove a folder, or whatever else is there, as far as that goes."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _flush(folder: Path) -> None:
    """Let the names in ``folder`` survive a power cut, where its file system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
