"""Ranks that agree on where to stop, as threads over a store in memory; and what else they tell each other."""

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from cases.patience import SECONDS
from torch.distributed import HashStore

from pipeplan.errors import BadInput, InvalidPlan, RunFailed, RunStopped
from pipeplan.runtime.device import DeviceWaits
from pipeplan.runtime.engine.executor import OperationFailed
from pipeplan.runtime.exchange.transport import PeerLost
from pipeplan.runtime.lowering.instructions import Send, sentence
from pipeplan.runtime.processes import messages
from pipeplan.runtime.processes.messages import (
    Failure,
    StorePeers,
    StoreStop,
    failure_of,
    failure_told,
    listed,
    looks,
    root_cause,
    stopped_after,
    told,
)


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
    seen, tell = [], stops[0]._tell
    stops[0]._tell = lambda: (seen.append(stops[0]._deciding), tell())
    assert stops[1]._thread.daemon, "a rank that fails doesn't wait for it"
    stops[1].ask()
    for stop in stops:
        stop._thread.join(SECONDS)
    assert [stop.limit for stop in stops] == [10] * 3
    assert seen == [True], "none begins meanwhile"
    found = [0] * 3
    threads = [
        threading.Thread(target=lambda rank=rank: found.__setitem__(rank, refused(stops[rank], (8, 10, 7)[rank])))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [10] * 3


def test_the_first_mini_batch_is_always_done():
    """Before it there is a checkpoint already."""
    stops = [StoreStop(HashStore(), 0, 1, 5, SECONDS)]
    stops[0].ask()
    stops[0]._thread.join(SECONDS)
    assert refused(stops[0], 5) == 6


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
    with pytest.raises(PeerLost, match=r"^the agreement on where to stop: [^\n]*[Tt]imeout[^\n]*$"):
        refused(stop, 0)


def test_without_a_signal_everything_may_begin():
    stop = StoreStop(HashStore(), 0, 2, 0, SECONDS)
    assert all(stop.may_begin(m) for m in range(1000))
    stop.close()
    assert stop.limit == messages.NEVER
    assert not stop._thread.is_alive(), "or it would ask the store until the process ends"


OOM = "; CUDA, NCCL and fragments take memory beside a plan's, which --reserve leaves to them"
LATE = "; a GPU reports its errors late, CUDA_LAUNCH_BLOCKING=1 shows where they are made"


def during(error):
    """The error of an operation that fails by another."""
    failed = OperationFailed(SEND)
    failed.__cause__ = error
    return failed


SEND = Send("B", 2, 7, 1)
IN = f" in {sentence(SEND)}"
WHY = [  # an error, and what is told of it
    (BadInput("no file"), "input", "no file", ()),
    (InvalidPlan(["one", "two"]), "input", "one; two", ()),
    (during(BadInput("no file")), "input", "no file", ()),
    (PeerLost("the send: gone", 1, 2), "lost", "rank 3 lost another rank: the send: gone", (1, 2)),
    (during(PeerLost("gone", 1)), "lost", f"rank 3 lost another rank{IN}: gone", (1,)),
    (DeviceWaits("a sum"), "lost", f"rank 3 lost another rank: {DeviceWaits('a sum')}", ()),
    (torch.AcceleratorError("CUDA error\nmore"), "failed", f"rank 3 failed: CUDA error{LATE}", ()),
    (during(torch.AcceleratorError("a\nb")), "failed", f"rank 3 failed in or before {sentence(SEND)}: a{LATE}", ()),
    (torch.OutOfMemoryError("full"), "failed", f"rank 3 failed: OutOfMemoryError: full{OOM}", ()),
    (RunFailed("it ends"), "failed", "rank 3 failed: it ends", ()),
    (during(ValueError("odd")), "failed", f"rank 3 failed{IN}: ValueError: odd", ()),
    (OperationFailed(SEND), "failed", f"rank 3 failed: OperationFailed: {OperationFailed(SEND)}", ()),
]


@pytest.mark.parametrize(("error", "kind", "message", "peers"), WHY, ids=range(len(WHY)))
def test_why_a_rank_fails_is_told_to_the_last_word(error, kind, message, peers):
    found = failure_of(3, error)
    assert (found.rank, found.kind, found.message, found.peers) == (3, kind, message, peers)
    assert (found.signal, found.host) == (0, "")
    assert found.trace.startswith("On rank 3:\n")
    assert type(error).__name__ in found.trace


def test_what_the_user_hears_of_a_failure():
    cases = [
        (Failure(1, "input", "bad", "where"), False, BadInput, "bad", 2),
        (Failure(1, "input", "bad"), True, BadInput, "rank 1: bad", 2),
        (Failure(1, "input", "bad", host="b"), True, BadInput, "rank 1 on b: bad", 2),
        (Failure(1, "failed", "bad"), True, RunFailed, "bad", 1),
        (Failure(1, "ended", "bad", signal=15), False, RunStopped, "bad", 143),
    ]
    for failure, elsewhere, kind, words, code in cases:
        error = failure.error(True) if elsewhere else failure.error()
        assert (type(error), str(error), error.exit_code) == (kind, words, code)
        assert getattr(error, "__notes__", []) == [failure.trace] * bool(failure.trace)
    kinds = [
        Failure(i, kind, "") for i, kind in enumerate(("lost", "died", "failed", "ended", "input", "failed", "lost"))
    ]
    assert [root_cause(kinds[:n]).rank for n in range(1, 8)] == [0, 1, 2, 2, 4, 4, 4]
    assert root_cause([kinds[3], kinds[2]]).rank == 2
    assert str(stopped_after(4, None, None)) == "stopped after update 4"
    assert str(stopped_after(4, Path("c"), None)) == "stopped after update 4; its checkpoint is in c"


def test_ranks_in_a_sentence_and_looks_in_time(monkeypatch):
    eight = "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert [listed(range(n)) for n in (1, 2, 8, 9)] == ["rank 0", "ranks 0, 1", eight, f"{eight}, ..."]
    now, slept = [100.0], []
    monkeypatch.setattr(messages.time, "monotonic", lambda: now[0])

    def sleep(seconds):
        slept.append(round(seconds, 6))
        assert len(slept) < 99, "it never ends"
        now[0] += seconds

    monkeypatch.setattr(messages.time, "sleep", sleep)
    assert len([*looks(0)]) == 1
    assert len([*looks(0.3)]) == 10
    assert slept == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.1, 0.073]


def impatient():
    """A store in which nobody waits for what isn't there."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def test_what_ranks_wait_for_names_those_that_have_not_said_anything():
    store = impatient()
    for rank, wait in ((1, 0.02), (0, 0.01)):
        others = [x for x in range(3) if x != rank and (x != 1 or rank == 1)]
        with pytest.raises(PeerLost, match=r"^the agreement .* meet: timed out after 0.03 s") as caught:
            StorePeers(store, rank, 3, 0.03 - wait).gathered("a", wait)
        assert list(caught.value.peers) == others
    assert store.get("told/0/1") == b'"a"'
    first, second = (StorePeers(impatient(), 0, 1, 1) for _ in range(2))
    assert [first.gathered("a"), first.gathered(None), second.gathered(None)] == [["a"], [None], [None]]
    assert failure_told(impatient(), 0) is None
    told(Failure(1, "died", "it died", peers=(2,)), store, 3, 0.0, 2)
    assert store.check(["heard/2"])
    assert not store.check(["heard/1"])
    assert failure_told(store, 1) == Failure(1, "died", "it died", peers=(2,))
    assert store.check(["heard/1"])
    with pytest.raises(PeerLost, match="meet: another rank has failed"):
        StorePeers(store, 1, 3, SECONDS).gathered("a")


def test_who_may_have_been_lost_is_kept_with_a_failure():
    store = impatient()
    one = told(Failure(1, "lost", "lost", peers=(2,)), store, 3, 0.0)
    assert json.loads(store.get("failed/1")) == [2]
    assert one == Failure(1, "lost", "rank 2 doesn't answer: lost", peers=(2,))
    alone = impatient()
    alone.set("failed/0", "[1]")
    assert told(Failure(1, "lost", "mine", peers=(0,)), alone, 2, 0.0).message == "mine", "all were heard of"
