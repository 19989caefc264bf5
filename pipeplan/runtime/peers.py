"""What do the processes of a run tell each other before they meet? Through the store that torchrun gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .exchange.transport import exchanging
from .training.checkpoint import Peers, tidy, usable_folder
from .training.folder_lock import one_run


class StorePeers:
    """The ``world`` processes that share ``store``; each waits ``timeout_s`` for the others' answers."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world = rank, world
        self._store, self._timeout_s, self._rounds = store, timeout_s, 0

    def gathered(self, mine: str | None, timeout_s: float = 0.0) -> Sequence[str | None]:
        """Return what each gave; wait ``timeout_s`` longer for them than for an answer."""
        keys = [f"told/{self._rounds}/{rank}" for rank in range(self.world)]
        self._rounds += 1
        with exchanging("the search for a checkpoint"):
            self._store.set(keys[self.rank], json.dumps(mine))
            self._store.wait(keys, timedelta(seconds=self._timeout_s + timeout_s))
            return [json.loads(self._store.get(key)) for key in keys]


@contextmanager
def writing_to(folder: Path | None, peers: Peers) -> Iterator[None]:
    """Let no other run write checkpoints to ``folder`` meanwhile, and leave nothing half written there.

    The first of ``peers`` sees to it, and all hear when it cannot: BadInput. None is no folder.
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
        yield
