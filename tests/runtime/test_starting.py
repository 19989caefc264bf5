"""How ranks that torchrun started find each other, whatever has been started again; and what ends them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from cases.patience import SECONDS

from pipeplan.errors import BadInput, RunFailed
from pipeplan.runtime.exchange.transport import PeerLost
from pipeplan.runtime.processes import rendezvous as starting_room
from pipeplan.runtime.processes import watchdog as watch_room
from pipeplan.runtime.processes.messages import FAILURE, Failure, StorePeers, failure_told, told
from pipeplan.runtime.processes.own_processes import context_of, has_gone
from pipeplan.runtime.processes.rendezvous import Start
from pipeplan.runtime.processes.watchdog import Watch, watching
from scripts.bench.starting import compared


@pytest.fixture
def store():
    return dist.HashStore()


def starting(store, rank, world=3, seconds=SECONDS):
    """Let a process of ``rank`` meet the others; returns it and its thread."""
    start = Start(rank, world, store=store)

    def meet():
        try:
            start.meet(seconds)
        except PeerLost as error:
            start.error = error

    start.error = None
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    return start, thread


def all_met(pairs):
    for _, thread in pairs:
        thread.join(SECONDS)
    assert all(start.met is not None for start, _ in pairs), [start.error for start, _ in pairs]
    numbers = {start._number for start, _ in pairs}
    assert len(numbers) == 1
    return numbers.pop()


def test_ranks_meet_in_any_order_and_again_after_some_were_started_anew(store):
    first = [starting(store, rank) for rank in (2, 0, 1)]
    number = all_met(first)
    assert not any(start.again or start.is_over(store) for start, _ in first)
    first[0][0].met.set("failure", "{}")
    again = [starting(store, rank) for rank in (1, 0, 2)]
    assert all_met(again) > number
    assert all(start.again and not start.met.check(["failure"]) for start, _ in again)
    assert all(start.is_over(store) for start, _ in first)
    assert not any(start.is_over(store) for start, _ in again)


def test_a_rank_that_dies_before_all_have_met_is_waited_for_until_it_is_started_again(store):
    """One agent alone may start its ranks anew; nobody counts how often."""
    gone, thread = starting(store, 1, seconds=0.05)
    thread.join(SECONDS)
    assert isinstance(gone.error, PeerLost)
    assert gone.error.peers == (0, 2)
    others = [starting(store, rank) for rank in (0, 2)]
    while not store.check(["proposed"]):
        time.sleep(0.01)
    assert not any(start.met for start, _ in others), "what is proposed names one that has gone"
    all_met([*others, starting(store, 1)])


@pytest.mark.parametrize("leader_dies", [True, False])
def test_a_proposal_of_one_that_has_gone_binds_nobody(store, leader_dies):
    """It dies once it has proposed, or agreed: the others that have agreed, too, follow the next one."""
    early = [starting(store, rank, seconds=0.2) for rank in ((0, 1) if leader_dies else (1, 2))]
    for _, thread in early:
        thread.join(SECONDS)
    assert all_met([starting(store, rank) for rank in (2, 1, 0)])


def test_who_is_late_hears_what_all_have_said_though_one_has_failed_by_it(store):
    """It looks for the others' words just before the last of them, and for a failure just behind that one's end."""

    class Late:
        looked = False

        def check(self, keys):
            if not self.looked:
                self.looked = True
                store.set("told/0", json.dumps([['"one"', '"other"'], [0, 1]]))
                store.set(FAILURE, "it differs")
                return False
            return store.check(keys)

        def __getattr__(self, name):
            return getattr(store, name)

    assert StorePeers(Late(), 1, 2, SECONDS).gathered("other") == ["one", "other"]


def test_each_rank_reads_but_once_what_all_have_said(store):
    """Equal words go through the store once for each rank, and not for each pair of them."""
    gets, world, words = [], 16, "x" * 1000

    class Counted:
        def __init__(self):
            self.store = dist.PrefixStore("c", store)

        def get(self, key):
            gets.append(len(found := self.store.get(key)))
            return found

        def __getattr__(self, name):
            return getattr(self.store, name)

    said = [None] * world

    def rank(number):
        said[number] = StorePeers(Counted(), number, world, SECONDS).gathered(words)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert said == [[words] * world] * world
    assert len(gets) == world
    assert max(gets) < 2 * len(words)


@pytest.mark.parametrize("ranks", [64, 256, 1024])
def test_what_all_say_takes_four_operations_of_the_store_for_each_rank(ranks):
    """A hundred layers, by what each rank calls."""
    operations, size, _ = compared(ranks)
    assert operations == 4 * ranks + 1
    assert size < 5000 * ranks


def test_a_failure_before_all_have_met_ends_the_others(store, monkeypatch):
    waiting = [starting(store, rank) for rank in (0, 2)]
    early = Start(1, 3, store=store)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    failure = Failure(1, "input", "plan.json: cannot be read")
    assert early.tell(failure) == failure
    assert not store.check(["failure"]), "torchrun starts it again"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    early.tell(failure)
    for start, thread in waiting:
        thread.join(SECONDS)
        assert "another rank has failed" in str(start.error)
        root = start.tell(Failure(start.rank, "lost", "lost"))
        assert str(root.error(elsewhere=True)) == "rank 1: plan.json: cannot be read"
        assert isinstance(root.error(), BadInput)
    assert early.stay(store, SECONDS) is None, "it stays until all have heard"
    assert store.check(["heard/0", "heard/2"])


def test_a_signal_that_torchrun_sends_on_behalf_of_a_dead_neighbour_names_that(store, monkeypatch):
    for name, value in {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    context = context_of()
    neighbour = context.Process(target=time.sleep, args=(SECONDS,))
    neighbour.start()
    try:
        store.set("process/0", str(neighbour.pid))
        assert Start(1, 2).dead_neighbour(store) is None
    finally:
        neighbour.kill()
        neighbour.join()
    if os.path.exists("/proc/self/stat"):
        assert Start(1, 2).dead_neighbour(store) == 0
    assert not has_gone(os.getpid())


def test_rank_0_says_for_whom_all_wait(store, monkeypatch):
    monkeypatch.setattr(starting_room, "LATE_S", 0.0)
    said = []
    with pytest.raises(PeerLost):
        Start(0, 12, store=store).meet(0.05, said.append)
    assert said == ["waits for ranks 1, 2, 3, 4, 5, 6, 7, 8, ... of 12 to start"]


# --- what ends them -------------------------------------------------------------------------------------------------


def ended(work, words, *arguments):
    """Do ``work`` in a process that a Watch watches over and that itself waits for ever; return its exit code.

    What it says comes into the file ``words``.
    """
    context = context_of()
    process = context.Process(target=_watched, args=(work, words, arguments))
    process.start()
    process.join(SECONDS)
    try:
        assert process.exitcode is not None, "it hangs"
        return process.exitcode
    finally:
        process.kill()


def _watched(work, words, arguments):
    os.dup2(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    watch_room.PATIENCE_S = 0.1
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watch_room.SIGNALS)  # a run that has started the server held them back
    with Watch() as watch:
        work(watch, *arguments)
        threading.Lock().acquire() and threading.Event().wait()


def signalled(watch, path):
    watch.tell_signal = lambda number: path.write_text(str(number)) and None
    os.kill(os.getpid(), signal.SIGTERM)


def failed_elsewhere(watch):
    watch.look(lambda: BadInput("rank 3: no plan"))


def signalled_after_a_failure(watch):
    watch.tell_signal = lambda number: RunFailed("rank 0 died")
    os.kill(os.getpid(), signal.SIGINT)


def asked_and_orphaned(watch, path):
    watch.ask = path.touch
    os.kill(os.getpid(), signal.SIGTERM)
    while not path.exists():
        time.sleep(0.01)
    watch._parent = -1


def test_a_watched_process_ends_by_itself_wherever_it_waits(tmp_path):
    words = tmp_path / "words"
    assert ended(signalled, words, tmp_path / "told") == 128 + signal.SIGTERM
    assert (tmp_path / "told").read_text() == "15"
    assert ended(failed_elsewhere, words) == 2
    assert ended(signalled_after_a_failure, words) == 1
    assert ended(asked_and_orphaned, words, tmp_path / "asked") == 128 + signal.SIGTERM
    assert words.read_text().splitlines() == [
        "ended by SIGTERM",
        "error: rank 3: no plan",
        "error: rank 0 died",
        "error: torchrun has gone, which started this process",
    ]


def test_signals_are_as_before_once_nobody_watches_and_for_what_is_forked_meanwhile(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    heard = []
    monkeypatch.setattr(watch_room.Watch, "_signalled", lambda _, number: heard.append(number))
    usual = signal.signal(signal.SIGUSR1, lambda *_: None)
    with watching():
        os.kill(os.getpid(), signal.SIGUSR1)
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    signal.signal(signal.SIGUSR1, usual)
    assert heard == [], "the handler's own"
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_first_reason_is_read_with_its_node():
    store = dist.HashStore()
    told(Failure(2, "ended", "rank 2 was ended by SIGTERM", signal=15, host="node1"), store, 3, 0.1)
    found = failure_told(store, 0)
    assert (found.host, found.error().exit_code) == ("node1", 143)
    assert store.check(["heard/0", "heard/2"])
