"""How do the ranks that torchrun started find each other, also after it has started some or all of them again?

In its store, which outlives them. Every agent counts restarts by itself, and one whose ranks had to end for another's
sake doesn't count that, so no variable tells what belongs together. Therefore each process takes a ticket, rank 0
proposes the tickets that it finds, and they have met once all that are named have agreed: a process that has gone
never does, and one that comes later is named in the next proposal.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..exchange.transport import PeerLost, exchanging
from .messages import FAILURE, GRACE_S, Failure, has_heard, listed, looks, told
from .own_processes import has_gone

START_S: Final = 600.0  # by which nodes may start one after the other
SERVED_S: Final = 60.0  # by which the store of an agent answers
TELL_S: Final = 30.0  # for which a rank that has failed looks for the store
LATE_S: Final = 10.0  # after which rank 0 says for whom all wait
HEARD_S: Final = 60.0  # for which one that failed before they met stays for those still to come, as the store does
WHERE: Final = "the meeting of the ranks"
_STARTS, _PROPOSED = "starts", "proposed"  # keys: the last ticket; what rank 0 has proposed last
_here, _agreed, _met, _process = "here/{}".format, "agreed/{}/{}".format, "met/{}".format, "process/{}".format


def number_in_environment(name: str, otherwise: int = 0) -> int:
    """Return a number that the environment has under ``name``."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else otherwise


@dataclass
class Start:
    """This process as ``rank`` of ``world``, in the ``run``-th run of a process; what it knows of the others.

    ``store`` is torchrun's, ``met`` the part of it for those that have met, None before; ``again`` says whether ranks
    had met before, and ``last`` the ticket that was then the newest.
    """

    rank: int
    world: int
    run: int = 0
    store: Any = None
    met: Any = None
    again: bool = False
    last: int = 0
    _number: int = field(default=0, init=False)
    _proposed: list[int] = field(default_factory=list, init=False)

    @staticmethod
    def of_environment(run: int = 0) -> Start:
        """Return what the environment names."""
        return Start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), run)

    @property
    def host(self) -> str:
        """This node's name; empty where all ranks are of one agent."""
        return "" if number_in_environment("LOCAL_WORLD_SIZE", self.world) == self.world else socket.gethostname()

    @property
    def starts_again(self) -> bool:
        """Whether torchrun starts the ranks of this node again when one fails."""
        return number_in_environment("TORCHELASTIC_RESTART_COUNT") < number_in_environment("TORCHELASTIC_MAX_RESTARTS")

    def connected(self, seconds: float) -> Any:
        """Return a connection of its own to torchrun's store; PeerLost if there is none within ``seconds``.

        What waits in one connection keeps all others that use it waiting.
        """
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        with exchanging(f"the way to torchrun's store at {place}, a name that every node must know"):
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        return dist.PrefixStore(f"pipeplan/{self.run}", store)  # type: ignore[attr-defined]  # not exported for type checkers

    def open(self, seconds: float) -> Any:
        """Return the store; it is connected to once. An agent's is there already."""
        if self.store is None:
            served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
            self.store = self.connected(min(seconds, SERVED_S) if served else seconds)
        return self.store

    def of_met(self, store: Any) -> Any:
        """Return the part of ``store``, a connection, that those who have met use."""
        return dist.PrefixStore(f"met/{self._number}", store)  # type: ignore[attr-defined]

    def meet(self, seconds: float = START_S, note: Callable[[str], None] | None = None) -> Any:
        """Meet all others that torchrun has started last, within ``seconds``; return the store that is theirs alone.

        PeerLost when some don't come, or one has failed for good. Rank 0 looks for all others, and the
        others for it; to ``note`` it says for whom all wait.
        """
        store = self.open(seconds)
        with exchanging(WHERE):
            ticket = int(store.add(_STARTS, 1))
            store.set(_here(self.rank), str(ticket))
            late = time.monotonic() + LATE_S
            for _ in looks(seconds):
                if store.check([FAILURE]):
                    raise PeerLost(f"{WHERE}: another rank has failed")
                if self.rank == 0:
                    self._propose(store)
                if self._has_met(store, ticket):
                    return self.met
                if note is not None and self.rank == 0 and time.monotonic() >= late:
                    if missing := self._missing(store):
                        note(f"waits for {listed(missing)} of {self.world} to start")
                    note = None
            missing = self._missing(store)
        raise PeerLost(f"{WHERE}: timed out after {seconds:g} s", *missing)

    def _propose(self, store: Any) -> None:
        """Propose who is to meet: those that are there, whenever others are than before."""
        keys = [_here(rank) for rank in range(self.world)]
        if not store.check(keys):
            return
        tickets = [int(ticket) for ticket in store.multi_get(keys)]
        last = int(store.add(_STARTS, 0))  # whose ticket is none of these takes the place of one that has gone
        if tickets != self._proposed:
            self._proposed = tickets
            store.set(_PROPOSED, json.dumps([store.add("proposals", 1), last, tickets]))

    def _missing(self, store: Any) -> list[int]:
        return [rank for rank in range(self.world) if not store.check([_here(rank)])]

    def _has_met(self, store: Any, ticket: int) -> bool:
        if not store.check([_PROPOSED]):
            return False
        number, last, tickets = json.loads(store.get(_PROPOSED))
        if tickets[self.rank] != ticket:
            return False
        store.set(_agreed(number, self.rank), "")
        if self.rank == 0 and store.check([_agreed(number, rank) for rank in range(self.world)]):
            store.set(_met(number), str(store.add("meetings", 1)))
        if not store.check([_met(number)]):
            return False
        self._number, self.last, self.again = number, last, int(store.get(_met(number))) > 1
        self.met = self.of_met(store)
        self.met.set(_process(self.rank), str(os.getpid()))
        return True

    def is_over(self, store: Any) -> bool:
        """Whether torchrun has started any rank again since they met; ``store`` is a connection."""
        return int(store.add(_STARTS, 0)) != self.last

    def dead_neighbour(self, met: Any) -> int | None:
        """Return a rank of this process's own agent that has gone, if there is one."""
        first = self.rank - number_in_environment("LOCAL_RANK")
        for rank in range(first, first + number_in_environment("LOCAL_WORLD_SIZE")):
            if rank != self.rank and met.check([_process(rank)]) and has_gone(int(met.get(_process(rank)))):
                return rank
        return None

    def tell(self, failure: Failure) -> Failure:
        """Tell the others of this rank's ``failure``, and return the root cause.

        Before they have met that is told only if torchrun won't start this rank again: others then wait for it. Of a
        neighbour that has died, which cannot tell, is told instead of its loss.
        """
        store, early = self.met, self.met is None
        try:
            if early and self.world > 1 and not self.starts_again:
                store = self.open(TELL_S)
            if store is None:
                return failure
            dead = self.dead_neighbour(store) if failure.kind == "lost" and not early else None
            if dead is not None:
                failure = self.died(dead, f": {failure.message}")
            root = told(replace(failure, host=self.host), store, self.world, GRACE_S, self.rank)
        except (PeerLost, RuntimeError):  # the store has gone, or doesn't answer
            return failure
        atexit.register(self.stay, store, HEARD_S if early else GRACE_S, failure.peers)
        return root

    def died(self, rank: int, words: str = "") -> Failure:
        """Return what to tell of a rank of this process's agent that has gone."""
        return Failure(rank, "died", f"rank {rank} died without a word, torchrun says how{words}", host=self.host)

    def stay(self, store: Any, seconds: float, lost: Sequence[int] = ()) -> None:
        """Where the store goes with torchrun on this node, wait until all have heard of the failure that is in it.

        At most so long: others than those that are known as ``lost`` may have gone.
        """
        if not self.host or number_in_environment("GROUP_RANK", self.rank):
            return
        keys = [has_heard(rank) for rank in range(self.world) if rank not in (self.rank, *lost)]
        with suppress(RuntimeError):  # the store has gone, and whoever listened
            for _ in looks(seconds):
                if store.check(keys):
                    return
