"""Which orders of many microbatches repeat a part of the middle of an order of fewer?"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from .problem import OrderProblem, Word
from .timing import Orders


def lengthened(problem: OrderProblem, words: Sequence[Word], microbatches: int) -> Iterator[list[Word]]:
    """Yield words of so many ``microbatches`` on devices, none on links.

    A part is what devices start from some time on, each kind of pass equally often. Repeating it adds that many
    microbatches, and as it leaves of each kind what it found, memory allows it.
    """
    orders = Orders(problem, words)
    if not orders.settle():
        return
    starts, more = orders.starts, microbatches - problem.microbatches
    for size in range(1, min(more, problem.microbatches) + 1):
        if more % size:
            continue
        seen = set()
        for since in sorted({starts[o] for device in problem.devices for o in orders.queues[device]}):
            places = [bisect_left(queue, since, key=starts.__getitem__) for queue in orders.queues]
            if tuple(places) in seen:
                continue
            seen.add(tuple(places))
            longer = _repeated(problem, words, places, size, more // size)
            if longer is not None:
                yield longer


def _repeated(
    problem: OrderProblem, words: Sequence[Word], places: Sequence[int], size: int, times: int
) -> list[Word] | None:
    """Return words with parts repeated so many more times that begin at ``places`` and have every kind ``size`` times;
    None where some device has no such part."""
    found: list[Word] = [()] * len(words)
    for device in problem.devices:
        kinds, word, at = problem.on[device], words[device], places[device]
        part = word[at : at + size * len(kinds)]
        if Counter(part) != dict.fromkeys(kinds, size):
            return None
        found[device] = word[:at] + part * times + word[at:]
    return found
