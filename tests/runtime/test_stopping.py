"""Ranks that agree on where to stop, as threads over a store in memory."""

import threading

import pytest

torch = pytest.importorskip("torch")
from cases.patience import SECONDS
from torch.distributed import HashStore

from pipeplan.runtime.exchange.transport import PeerLost
from pipeplan.runtime.processes import messages
from pipeplan.runtime.processes.messages import StoreStop


@pytest.fixture(autouse=True)
def looking_often(monkeypatch):
    monkeypatch.setattr(messages, "POLL_S", 0.01)


def refused(stop, first):
    """Begin mini-batches from ``first`` on until one is refused; return that."""
    minibatch = first
    while stop.may_begin(minibatch):
        minibatch += 1
    return minibatch


def test_all_ranks_stop_before_the_first_mini_batch_that_none_has_begun():
    store = HashStore()
    stops = [StoreStop(store, rank, 3, 5, SECONDS) for rank in range(3)]
    for rank, last in enumerate((7, 9, 6)):
        assert all(stops[rank].may_begin(m) for m in range(5, last + 1))
    stops[1].ask()
    found = [0] * 3
    threads = [
        threading.Thread(target=lambda rank=rank: found.__setitem__(rank, refused(stops[rank], (8, 10, 7)[rank])))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found[0] == found[1] == found[2] >= 10
    assert {stop.limit for stop in stops} == set(found)


def test_the_first_mini_batch_is_always_done():
    """Before it there is a checkpoint already."""
    stops = [StoreStop(HashStore(), 0, 1, 5, SECONDS)]
    stops[0].ask()
    assert refused(stops[0], 5) >= 6


def test_a_rank_that_has_finished_keeps_nobody_waiting():
    store = HashStore()
    here, there = (StoreStop(store, rank, 2, 0, SECONDS) for rank in range(2))
    assert all(there.may_begin(m) for m in range(4))
    there.close()
    here.ask()
    assert refused(here, 0) >= 4


def test_ranks_that_cannot_agree_have_lost_each_other():
    stop = StoreStop(HashStore(), 0, 2, 0, 0.1)
    stop.ask()
    with pytest.raises(PeerLost, match="the agreement on where to stop"):
        refused(stop, 0)


def test_without_a_signal_everything_may_begin():
    stop = StoreStop(HashStore(), 0, 2, 0, SECONDS)
    assert all(stop.may_begin(m) for m in range(1000))
    stop.close()
    assert stop.limit == messages.NEVER
