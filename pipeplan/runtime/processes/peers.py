"""What do the processes of a run tell each other before they meet? Through the store that torchrun gives them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ...errors import BadInput
from ..engine.failure import FAILURE
from ..exchange.transport import PeerLost, exchanging
from ..training.state.checkpoint import Peers, tidy, usable_folder
from ..training.state.folder_lock import one_run
from .presence import Presences

WHERE: Final = "the agreement of the ranks before they meet"
SHARED_S: Final = 5.0  # in which a folder that is shared shows on every node what one of them has written
LOOKS_S: Final = (0.001, 0.1)  # pauses between two looks, growing from the first to the second


class StorePeers:
    """The ``world`` processes that share ``store``; each waits ``timeout_s`` for the others' answers, if none has gone
    by what ``presences`` sees."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float, presences: Presences | None = None) -> None:
        self.rank, self.world, self._presences = rank, world, presences
        self._store, self._timeout_s, self._rounds = store, timeout_s, 0

    def gathered(self, mine: str | None, timeout_s: float = 0.0) -> Sequence[str | None]:
        """Return what each gave; wait ``timeout_s`` longer for them than for an answer.

        Rank 0 reads what all gave and writes it in one piece, equal words once, so that what goes through the store
        grows with the ranks and not with their square. PeerLost when some don't come, or when any rank has failed.
        """
        keys, every = [f"told/{self._rounds}/{rank}" for rank in range(self.world)], f"told/{self._rounds}"
        self._rounds += 1
        with exchanging(WHERE):
            self._store.set(keys[self.rank], json.dumps(mine))
            self._await(keys, [every] if self.rank else keys, self._timeout_s + timeout_s)
            if not self.rank:
                given = [words.decode() for words in self._store.multi_get(keys)]
                places = {words: place for place, words in enumerate(dict.fromkeys(given))}
                self._store.set(every, json.dumps([list(places), [places[words] for words in given]]))
            told, whose = json.loads(self._store.get(every))
            return [json.loads(told[place]) for place in whose]

    def _await(self, keys: Sequence[str], awaited: list[str], timeout_s: float) -> None:
        for _ in looks(timeout_s):
            if self._store.check(awaited):
                return
            if self._store.check([FAILURE]) and not self._store.check(awaited):  # it may have failed by these
                raise PeerLost(f"{WHERE}: another rank has failed")
            if self._presences is not None:
                self._presences.check(WHERE, lambda: [0] if self.rank else self._missing(keys))  # which looks for all
        raise PeerLost(f"{WHERE}: timed out after {timeout_s:g} s", *self._missing(keys))

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


def looks(seconds: float) -> Iterator[None]:
    """Yield now, and with growing pauses until ``seconds`` have passed, and once more then."""
    until, pause = time.monotonic() + seconds, LOOKS_S[0]
    while (left := until - time.monotonic()) > 0:
        yield
        time.sleep(min(pause, left))
        pause = min(2 * pause, LOOKS_S[1])
    yield


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
                usable_folder(folder)
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
            held.callback(_remove, folder / token)
            (folder / token).touch()
        host = socket.gethostname()
        first, *_ = (json.loads(said or "") for said in peers.gathered(json.dumps([token, host, str(folder)])))
        path = folder / first[0]
        seen = any(os.path.exists(path) for _ in looks(SHARED_S))
        answers = peers.gathered(None if seen else host)
    for rank, other in enumerate(answers):
        if other is not None:
            raise BadInput(
                f"checkpoint: {first[2]} isn't one folder for all: what rank 0 on {first[1]} writes there, "
                f"rank {rank} on {other} doesn't see; name one that all nodes share"
            )


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
