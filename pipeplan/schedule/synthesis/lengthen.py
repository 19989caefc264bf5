"""Which orders of many microbatches repeat a part of the middle of an order of fewer?"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from .problem import OrderProblem, Word
from .timing import Orders


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
