"""What does it take N ranks to meet? Store operations and bytes, sockets, seconds, by calling what each rank calls.

    python scripts/bench/starting.py 64 256 1024

Ranks that do the same are called once and counted as often. Nothing is started: the store is a dictionary that counts,
groups of gloo are made in threads as far as ``--gloo`` ranks, once connected to all and once only where it is needed.
Then all of a group exchange what a run does: what everybody says, a flag, a barrier, and results for rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeplan.runtime.exchange.links import in_rounds
from pipeplan.runtime.exchange.transport import LAZY, spare_sockets
from pipeplan.runtime.processes.agreement import compare
from pipeplan.runtime.processes.messages import StorePeers

LAYERS = 100


class Counting(dist.Store):
    """A store that counts its operations and the bytes of keys and values that go to and fro."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}
        self.operations = self.bytes = 0
        self._changed = threading.Condition()

    def _count(self, *words: str | bytes) -> None:
        with self._changed:
            self.operations, self.bytes = self.operations + 1, self.bytes + sum(map(len, words))

    def set(self, key: str, value: str | bytes) -> None:
        found = value if isinstance(value, bytes) else value.encode()
        self._count(key, found)
        with self._changed:
            self.kept[key] = found
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self.kept)
        self._count(key, self.kept[key])
        return self.kept[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self.kept[key] for key in keys]
        self._count(*keys, *found)
        return found

    def add(self, key: str, amount: int) -> int:
        found = int(self.kept.get(key, b"0")) + amount
        self.set(key, str(found))
        return found

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return all(key in self.kept for key in keys)

    def wait(self, keys: list[str], *_: object) -> None:
        self._count(*keys)
        with self._changed:
            self._changed.wait_for(lambda: all(key in self.kept for key in keys))

    def set_timeout(self, timeout: timedelta) -> None:
        pass


def compared(world: int) -> tuple[int, int, float]:
    """Return operations, bytes and seconds of the comparison of a model with LAYERS layers by all ranks."""
    items = {f"layer {i} of the model": f"of checksum {i:012x}" for i in range(LAYERS)}
    store = Counting()
    given = Given(world)
    begin = time.perf_counter()
    compare(items, given)  # what each says
    for rank in range(1, world):
        StorePeers(store, rank, world, 60)._store.set(f"told/0/{rank}", json.dumps(given.said))
    for rank, times in ((0, 1), (1, world - 1)):
        before = store.operations, store.bytes
        compare(items, StorePeers(store, rank, world, 60))
        if rank:
            more = store.operations - before[0], store.bytes - before[1]
            store.operations += more[0] * (times - 1)
            store.bytes += more[1] * (times - 1)
    return store.operations, store.bytes, time.perf_counter() - begin


class Given:
    """Peers that all say the same, and note what."""

    def __init__(self, world: int) -> None:
        self.rank, self.world, self.said = 0, world, ""

    def gathered(self, mine: str | None, timeout_s: float = 0.0) -> list[str | None]:
        self.said = mine or ""
        return [mine] * self.world


def connected(world: int, lazy: bool, used: bool = True) -> list[tuple[int, int, int, float]]:
    """Return operations, bytes, files and seconds of making one group of gloo of all ranks; then those with its use."""
    os.environ[LAZY] = "0"
    if lazy:
        del os.environ[LAZY]
        spare_sockets()
    store, files = Counting(), len(os.listdir("/proc/self/fd"))
    begin, found = time.perf_counter(), []
    groups: dict[int, dist.ProcessGroupGloo] = {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, world, timedelta(minutes=5))

    def use(rank: int) -> None:
        exchange(groups[rank], rank, world)

    for work in (make, use) if used else (make,):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        open_files = len(os.listdir("/proc/self/fd")) - files
        found.append((store.operations, store.bytes, open_files, time.perf_counter() - begin))
    return found


def exchange(group: dist.ProcessGroupGloo, rank: int, world: int) -> None:
    """Do once what a run does in a group of all ranks."""
    said = torch.zeros(100, dtype=torch.uint8)
    group.allgather([[torch.empty_like(said) for _ in range(world)]], [said]).wait()
    group.allreduce([torch.zeros(1)]).wait()
    group.barrier().wait()
    if rank:
        group.send([said], 0, 0).wait()
    else:
        for other in range(1, world):
            group.recv([said], other, 0).wait()
    group.barrier().wait()


def main() -> None:
    """Print a line for each number of ranks and part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--gloo", type=int, default=64, help="most ranks of which groups are made")
    parser.add_argument(
        "--lazy", type=int, default=256, help="most ranks of which such are made as connect where needed"
    )
    parser.add_argument("--used", type=int, default=512, help="most ranks whose groups exchange something, too")
    asked = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for world in asked.ranks:
        operations, size, seconds = compared(world)
        print(f"{world} ranks: comparison {operations:,} operations, {size / 1e6:,.3f} MB, {seconds:.2f} s", flush=True)
        begin = time.perf_counter()
        pairs = in_rounds([(a, b) for a in range(world) for b in (a - 1, a + 1) if 0 <= b < world])
        print(
            f"{world} ranks: {len(pairs):,} pairs of a chain in rounds in {time.perf_counter() - begin:.3f} s",
            flush=True,
        )
        for lazy in [False] * (world <= asked.gloo) + [True] * (world <= asked.lazy):
            how = "connected where needed" if lazy else "connected to all"
            for state, counts in zip(("made", "used"), connected(world, lazy, world <= asked.used), strict=False):
                operations, size, files, seconds = counts
                print(
                    f"{world} ranks: a group of gloo, {how}, {state}: {operations:,} operations, {size / 1e6:,.3f} MB, "
                    f"{files:,} files, {seconds:.2f} s",
                    flush=True,
                )
    os._exit(0)  # groups of threads have no orderly end


if __name__ == "__main__":
    main()
