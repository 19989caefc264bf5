"""Do all ranks begin the same run? What must be equal on all of them, item by item, and the first difference.

Under torchrun every node reads its own files. A plan, an option or a model that differs on one of them would train
something that nobody asked for, without any error.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import secrets
import socket
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import torch
from torch import fx, nn

from ...errors import BadInput
from ...files.text import regular
from ...plan import Plan
from ...version import __version__
from ..engine.job import Job, RunOptions
from ..exchange.collective import this_machine
from ..model.build.spec import ModelSpec, builder_of
from ..model.loaded import LoadedModel
from ..training.state.checkpoint import Checkpoint, Peers, newest, tidy
from ..training.state.written import unreadable
from .messages import looks

OWN: Final = {"save", "load", "checkpoint", "timeout_s", "threads", "device"}  # options of each node's own
PLANNED: Final = ("chain", "platform", "policy", "allocation", "pattern", "schedule")  # what a run reads of a plan
SHOWN: Final = 60  # characters; of what is longer messages have the checksum
CODE: Final = "the code of "
PARTS: Final = "in parts of "
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
UNKNOWN: Final = "?"  # the address of a host whose name stands for none, which gloo takes for the loopback's
INSTALLED: Final = {"site-packages", "dist-packages"}  # folders of libraries, whose versions tell enough
STANDARD: Final = Path(sysconfig.get_path("stdlib"))
LOCK: Final = ".lock"
CHUNK: Final = 2**20  # bytes that are read at once
SAMPLES: Final = 256  # pieces of a state that are compared, so much apart
SHARED_S: Final = 5.0  # in which a folder that is shared shows on every node what one of them has written
STATES: Final = (".safetensors", ".json", ".bin", ".pt")
_VARYING = re.compile(r" at 0x[0-9a-f]+|(?<=cuda:)\d+")  # in the words for equal objects of different processes


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank says of itself: its host, the address under which that knows itself (:data:`UNKNOWN` if it knows
    none, empty if the user has named an interface), what tells the machine from others, and what all must have alike,
    by name."""

    host: str
    address: str
    machine: str
    items: Mapping[str, str]


def compare(items: Mapping[str, str], peers: Peers, timeout_s: float = 0.0) -> Sequence[Statement]:
    """Return what every rank says of itself; they wait ``timeout_s`` longer than usually.

    BadInput, the same on all ranks, names the first of ``items`` in which two differ, and both. So it does where ranks
    on several machines cannot find each other.
    """
    place = (socket.gethostname(), _own_address(), this_machine())
    said = peers.gathered(json.dumps([*place, _digest(json.dumps(items, sort_keys=True))]), timeout_s)
    places = [json.loads(words or "") for words in said]
    everybodys = [Statement(host, address, machine, items) for host, address, machine, _ in places]
    if len({digest for *_, digest in places}) > 1:  # only then do all say what they have
        said = peers.gathered(json.dumps(items))
        everybodys = [replace(x, items=json.loads(words or "")) for x, words in zip(everybodys, said, strict=True)]
    wrong = difference(everybodys) or unreachable(everybodys)
    if wrong is not None:
        raise BadInput(wrong)
    return everybodys


def difference(everybodys: Sequence[Statement]) -> str | None:
    """Return the first item that isn't the same for rank 0 and another rank; None if all are.

    Code counts where both have it, as a rank may import what others don't need, and so do parts of a model.
    """
    first = everybodys[0]
    for rank, other in enumerate(everybodys[1:], 1):
        parted = any(name.startswith(PARTS) for name in (*first.items, *other.items))
        for name in [*first.items, *(name for name in other.items if name not in first.items)]:
            here, there = first.items.get(name), other.items.get(name)
            if here == there or (None in (here, there) and (parted or name.startswith(CODE))):
                continue
            what = " and ".join(
                f"{'missing' if value is None else value} for rank {number} on {host}"
                for value, number, host in ((here, 0, first.host), (there, rank, other.host))
            )
            return f"the ranks differ: {name} is {what}; every node needs the same"
    return None


def unreachable(everybodys: Sequence[Statement]) -> str | None:
    """Return which rank's host name stands for an address that other machines cannot reach; None if none does."""
    if len({said.machine for said in everybodys}) == 1:
        return None
    for rank, said in enumerate(everybodys):
        if said.address.startswith((UNKNOWN, "127.", "::1")):
            stands = "no address" if said.address == UNKNOWN else f"{said.address} there, which no other node reaches"
            return (
                f"rank {rank}'s host name {said.host} stands for {stands}; "
                f"set {INTERFACE} and NCCL_SOCKET_IFNAME on every node to the interface of its network "
                "(ip -brief address lists them)"
            )
    return None


def _own_address() -> str:
    if INTERFACE in os.environ:
        return ""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return UNKNOWN


# --- the checkpoints --------------------------------------------------------------------------------------------------


@contextmanager
def one_run(folder: Path) -> Iterator[None]:
    """Make ``folder``, and let no other run write to it meanwhile; BadInput when that fails, or one does.

    The lock is the kernel's, on a file in the folder, so a run that is killed leaves none behind. On a file system
    without locks nothing is kept out.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"checkpoint: {folder} cannot be made: {error.strerror}") from error
    try:
        handle = _locked(path)
    except OSError as error:
        raise BadInput(f"checkpoint: {folder} cannot be written to: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is locked: whoever opened it before sees that it has gone
        os.close(handle)


def _locked(path: Path) -> int:
    """Return the handle of the file ``path`` with its lock; BadInput when another process has it."""
    while True:
        here = False  # whether the open file still has this name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = re.match(rb"process \d{1,9} on [\w.-]{1,64}\n", os.pread(handle, 100, 0))
            os.close(handle)
            who = f", {owner[0].decode().strip()}," if owner else ""
            raise BadInput(f"checkpoint: another run{who} writes to {path.parent}") from None
        except OSError:  # no locks here
            return handle
        with suppress(OSError):
            here = os.path.samestat(os.fstat(handle), os.lstat(path))
        if here:
            with suppress(OSError):  # who has it is no more than a help
                os.truncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return handle
        os.close(handle)  # its owner has just removed it


@contextmanager
def writing_to(folder: Path | None, peers: Peers) -> Iterator[None]:
    """Let no other run write checkpoints to ``folder`` meanwhile, and leave nothing half written there.

    The first of ``peers`` sees to it, and all hear when it cannot, or when theirs is another folder: BadInput. None is
    no folder.
    """
    if folder is None:
        yield
        return
    with ExitStack() as held:
        wrong = None
        if peers.rank == 0:
            try:
                held.enter_context(one_run(folder))
                tidy(folder)
                held.callback(tidy, folder)
            except BadInput as error:
                wrong = str(error)
        wrong = peers.gathered(wrong)[0]
        if wrong is not None:
            raise BadInput(wrong)
        if peers.world > 1:
            _refuse_unshared(folder, peers)
        yield


def _refuse_unshared(folder: Path, peers: Peers) -> None:
    """Raise BadInput on all ranks unless each of ``peers`` sees in ``folder`` what the first one writes there.

    What is written begins as half a checkpoint does, so it is removed with those should nobody come to it.
    """
    token = f".step-{secrets.token_hex(8)}.token" if peers.rank == 0 else None
    with ExitStack() as held:
        if token is not None:
            (folder / token).touch()
            held.callback((folder / token).unlink, missing_ok=True)
        host = socket.gethostname()
        first, *_ = (json.loads(said or "") for said in peers.gathered(json.dumps([token, host, str(folder)])))
        path = folder / first[0]
        seen = any(os.path.exists(path) for _ in looks(SHARED_S))
        answers = peers.gathered(None if seen else host)
    for rank, other in enumerate(answers):
        if other is not None:
            raise BadInput(
                f"checkpoint: {first[2]} isn't the same folder for all ranks: what rank 0 on {first[1]} writes there, "
                f"rank {rank} on {other} doesn't see; name one that all nodes share"
            )


def resume_point(job: Job, note: Callable[[str], None] | None, peers: Peers) -> Checkpoint | None:
    """Return the checkpoint to go on from, if there is one; ``note`` hears of every damaged one, passed over,
    and of another number of microbatches for an update.

    All ``peers`` look together. BadInput when it is of another model or seed.
    """
    folder, seed = job.options.checkpoint, job.options.seed
    hear = None if note is None else lambda words: note(f"damaged, and passed over: {words}")
    found = None if folder is None else newest(folder, hear, peers, unreadable)
    if found is not None and found.model != job.plan.chain.name:
        raise BadInput(f"{found.path}: is of model {found.model}; the plan is for {job.plan.chain.name}")
    if found is not None and found.seed != seed:
        raise BadInput(f"{found.path}: was made with seed {found.seed}, which gave its data; this run has {seed}")
    if found is not None and note is not None and not peers.rank and not job.options.evaluates:
        before, now = found.position.microbatch / found.position.step, job.plan.interval
        if before != now:
            note(
                f"the first {found.position.step} updates of this training had {before:g} microbatches each, those of "
                f"this plan have {now}: the rate may want to change with that; --accumulate plans for another number"
            )
    return found


# --- the items -----------------------------------------------------------------------------------------------------


def run_items(plan: Plan, model: ModelSpec, options: RunOptions) -> dict[str, str]:
    """Return what can be compared before the model is built: versions, plan, and what is asked for."""
    items = {
        "the version of pipeplan": __version__,
        "the version of Python": platform.python_version(),
        "the version of torch": torch.__version__,
        "the model's name": model.build,
        "the data's name": str(model.data),
    }
    items |= {f"the plan's {name}": repr(getattr(plan, name)) for name in PLANNED}
    asked = [field.name for field in fields(RunOptions) if field.name not in OWN]
    items |= {f"the option {name.removesuffix('_s').replace('_', ' ')}": repr(getattr(options, name)) for name in asked}
    items["the option checkpoint"] = "not given" if options.checkpoint is None else "a folder"
    items["the file of weights to load"] = "none" if options.load is None else _state_sum(options.load)
    return _shown(items)


def checkpoint_items(found: Checkpoint | None) -> dict[str, str]:
    """Return what is compared of the checkpoint to go on from."""
    if found is None:
        return {"the checkpoint to go on from": "none"}
    files = {name: (file.bytes, file.crc32) for name, file in found.files.items()}
    return {
        "the checkpoint to go on from": f"of update {found.position.step}",
        "the content of the checkpoint to go on from": _digest(repr((found.position, found.model, found.seed, files))),
    }


def model_items(spec: ModelSpec, model: LoadedModel) -> dict[str, str]:
    """Return what is compared of a model that has been built, before it is fitted to the plan.

    Each layer as it prints itself, with its weights and buffers, and the user's code that made it.
    """
    layers, of = enumerate(model.layers), "" if spec.place is None else f"{PARTS}{spec.ranks} "
    items = {f"{of}layer {index} of the model": f"{layer.name}: {_layer(layer.module)}" for index, layer in layers}
    items[f"{of}what crosses the layers of the model"] = ", ".join(map(str, model.specs.values()))
    return _shown(items) | _code(spec)


def _layer(module: nn.Module) -> str:
    tensors = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in module.state_dict(keep_vars=True).items()]
    graphs = [part.code for part in module.modules() if isinstance(part, fx.GraphModule)]
    return "; ".join(["" if graphs else repr(module), *tensors, *graphs])


def _code(spec: ModelSpec) -> dict[str, str]:
    """Return checksums of the modules that lie where the user's model and data do, as far as they are imported."""
    names = [] if spec.of_zoo else [builder_of(spec).__module__, spec.build.partition(":")[0]]
    names += [] if spec.data is None else [spec.data.partition(":")[0]]
    own = [path for path in map(_path_of, names) if path is not None]
    folders = {path.parent for name in names if (path := _path_of(name.partition(".")[0]) or _path_of(name))}
    found: dict[str, str] = {}
    for name in sorted(sys.modules):
        path = _path_of(name)
        if path is not None and (path in own or any(_is_inside(path, folder) for folder in folders)):
            found[f"{CODE}{name}"] = _file_sum(path)
    return found


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a file lies in ``folder`` and isn't of Python or a library that is installed there."""
    if not path.is_relative_to(folder) or folder.name in INSTALLED:
        return False
    return not INSTALLED.intersection(path.relative_to(folder).parts) and not path.is_relative_to(STANDARD)


def _path_of(name: str) -> Path | None:
    path = getattr(sys.modules.get(name), "__file__", None)
    return Path(path) if isinstance(path, str) and path.endswith(".py") and os.path.isfile(path) else None


def _shown(items: Mapping[str, str]) -> dict[str, str]:
    """Return ``items`` as messages can have them: what is long, or isn't one line, as its checksum."""
    plain = {name: _VARYING.sub("", value).strip("; ") for name, value in items.items()}
    return {k: v if len(v) <= SHOWN and v.isprintable() else f"of checksum {_digest(v)}" for k, v in plain.items()}


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def _state_sum(path: Path) -> str:
    """Return the checksum of a file, or of a folder's files by name; of long ones of a part, as each rank reads its."""
    if not path.is_dir():
        return _file_sum(path, SAMPLES)
    names = sorted(x for x in path.iterdir() if x.suffix in STATES)
    return f"of checksum {_digest(repr([(x.name, _file_sum(x, SAMPLES)) for x in names]))}"


def _file_sum(path: Path, samples: int | None = None) -> str:
    """Return the checksum of a file; what cannot be read is said so, as others say better what that means.

    Of one longer than ``samples`` pieces that of its length and so many pieces of it.
    """
    try:
        size = regular(path).st_size
        crc = zlib.crc32(str(size).encode())
        step = CHUNK if samples is None else max(CHUNK, size // samples)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                crc = zlib.crc32(file.read(CHUNK), crc)
    except (OSError, BadInput) as error:
        return f"unreadable ({error})"
    return f"of checksum {crc:08x}"
