"""Which orders repeat a block of slots for every microbatch, on stages like a V, or a part of an order of fewer?

Source: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), section 3: a microbatch goes down, up, down and
up again, on each of the four ways some slots later on each next device; how long it is under way says how many are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from ...cost.stage_graph import StageGraph
from ..programs.controlled import PERIOD, block_passes
from ..programs.vees import no_vee
from .justify import Orders
from .problem import OrderProblem, Word

WAITS = (0, 1, 2, 3)  # slots where a way turns
TRIED = 5 * 10**4  # passes in blocks that are tried
SPREAD = 6  # slots below what memory has room for in which blocks are looked for
WEIGHTS = 6  # slots that the two chunks' activations stay for their weight gradients, about

Block = list[list[int]]  # for each device the slots of its forwards, then backwards: first chunk, second, second, first


def ways(devices: int) -> list[tuple[int, ...]]:
    """Return when a way reaches each device: evenly, or on few devices slower or faster from one of them on."""
    slopes = (1, 2, 3) if devices <= 4 else (1, 2) if devices <= 8 else ()
    found = {tuple(step * d for d in range(devices)) for step in (1, 2, 3, 4)}
    for one in slopes:
        for other in slopes:
            for turn in range(1, devices):
                found.add(tuple(one * min(d, turn) + other * max(0, d - turn) for d in range(devices)))
    return sorted(found)


def blocks(devices: int, most: int) -> list[tuple[int, int, Block]]:
    """Return blocks whose passes fill different slots of a period: for how many slots, ``most`` at most, a device holds
    one's activations, how many slots it takes, and the slots."""
    found: list[tuple[int, int, Block]] = []
    choices = ways(devices)

    def held(rows: Sequence[Sequence[int]]) -> int:
        first, second, back_second, back_first = rows
        return max(back_first[d] - first[d] + back_second[d] - second[d] for d in range(devices))

    def go_on(rows: list[list[int]], at: int) -> None:
        if len(rows) == 4:
            found.append((held(rows), rows[3][0], [list(slots) for slots in zip(*rows, strict=True)]))
            return
        for way in choices:
            for wait in WAITS if rows else (0,):
                row = [at + wait + slot for slot in way]
                after = row[-1] + 1
                if len(rows) % 2:
                    row.reverse()
                if any((one - other) % PERIOD == 0 for past in rows for one, other in zip(row, past, strict=True)):
                    continue
                more = [*rows, row]
                if len(more) == 3:
                    home = list(range(after + devices - 1, after - 1, -1))  # at the earliest
                    if held([*more, home]) > most:
                        continue
                elif len(more) == 4 and held(more) > most:
                    continue
                go_on(more, after)

    go_on([], 0)
    return sorted(found)


def repeated(graph: StageGraph, problem: OrderProblem) -> Iterator[list[Word]]:
    """Yield words of some blocks that fit the memory, those that hold most first; none where stages aren't like a V."""
    if no_vee(graph) is not None or len(graph.operations) == len(problem.durations):
        return
    homes = list(dict.fromkeys(stage.resource for stage in graph.stages))
    path = len(graph.operations)
    room = min(_fitting(problem, home) for home in homes)
    most = PERIOD * room - WEIGHTS
    fitting = [x for x in blocks(len(homes), most) if x[0] >= min(most, 12 * len(homes)) - SPREAD]
    fitting.sort(key=lambda x: (x[1] - x[0] // 2, -x[0]))
    tried = max(8, TRIED // (len(problem.durations) * problem.microbatches))
    for _, _, block in fitting[:tried]:
        words: list[Word] = [()] * len(problem.on)
        for home, passes in zip(homes, block_passes(block, problem.microbatches), strict=True):
            words[home] = tuple(
                path + stage if kind == "W" else graph.position[kind, stage]  # type: ignore[index]  # F or B
                for kind, stage, _ in passes
            )
        if all(problem.holds(home, words[home]) for home in homes):
            yield words


def _fitting(problem: OrderProblem, device: int) -> int:
    """Return how many microbatches' activations of the device's greatest chunk it has room for, at most all."""
    most = 2 * problem.microbatches
    for store in problem.stores:
        greatest = max(store.starts[k] for k in problem.on[device])
        if greatest:
            most = min(most, store.room[device] // greatest)
    return most


def lengthened(problem: OrderProblem, words: Sequence[Word], microbatches: int) -> Iterator[list[Word]]:
    """Yield words of so many ``microbatches`` on devices, none on links.

    A part is what a device starts from some time on, each kind of pass equally often. Repeating it adds that many
    microbatches, and as it leaves of each kind what it found, memory allows it. On each device it is the first one from
    a common time on; where these don't go together the words deadlock or take long.
    """
    orders = Orders(problem, words)
    if not orders.settle():
        return
    more = microbatches - problem.microbatches
    for size in range(1, min(more, problem.microbatches) + 1):
        if more % size:
            continue
        places = {device: _places(problem, words[device], device, size) for device in problem.devices}
        times = {
            device: [orders.starts[orders.queues[device][at]] for at in places[device]] for device in problem.devices
        }
        seen = set()
        for since in sorted({time for some in times.values() for time in some}):
            first = [bisect_left(times[device], since) for device in problem.devices]
            chosen = [(d, places[d][at]) for d, at in zip(problem.devices, first, strict=True) if at < len(places[d])]
            if len(chosen) < len(first):
                break
            if tuple(chosen) not in seen:
                seen.add(tuple(chosen))
                yield _repeated(problem, words, chosen, size, more // size)


def _places(problem: OrderProblem, word: Word, device: int, size: int) -> list[int]:
    """Return where parts of a device's word begin that have every kind ``size`` times."""
    length = size * len(problem.on[device])
    count = Counter(word[:length])
    found = []
    for at in range(len(word) - length + 1):
        if all(count[kind] == size for kind in problem.on[device]):
            found.append(at)
        if at + length < len(word):
            count[word[at + length]] += 1
            count[word[at]] -= 1
    return found


def _repeated(
    problem: OrderProblem, words: Sequence[Word], chosen: Sequence[tuple[int, int]], size: int, times: int
) -> list[Word]:
    """Return words with parts repeated so many more times; ``chosen``: of each device where its part begins."""
    found: list[Word] = [()] * len(words)
    for device, at in chosen:
        word, length = words[device], size * len(problem.on[device])
        found[device] = word[:at] + word[at : at + length] * times + word[at:]
    return found
