"""What two processes of one machine give each other: nothing is lost, memory is used again, who goes is noticed."""

import os
import socket
import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from cases.patience import SECONDS

from pipeplan.runtime.exchange.nearby import wires
from pipeplan.runtime.exchange.transport import PeerLost, exchanging
from pipeplan.runtime.model.network import TensorSpec

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="wires are for Linux")
PATIENT = timedelta(seconds=SECONDS)


def between(pairs, timeout=PATIENT):
    """The ends of wires between pairs of ranks, by rank and peer; each rank opens its own in the order of ``pairs``."""
    links, ends = {}, {}
    for one, other in pairs:
        if (one, other) not in links:
            links[one, other], links[other, one] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def open_ends(rank):
        ends[rank] = wires._wires({other: links[one, other] for one, other in pairs if one == rank}, timeout)

    threads = [threading.Thread(target=open_ends, args=[rank], daemon=True) for rank in {one for one, _ in pairs}]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return ends


def both(timeout=PATIENT):
    """The two ends of a wire."""
    ends = between([(0, 1), (1, 0)], timeout)
    return ends[0][1], ends[1][0]


def test_three_that_open_their_wires_in_a_circle_come_through():
    ends = between([(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)])
    assert {rank: set(own) for rank, own in ends.items()} == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
    ends[2][0].want((5, 5))
    ends[0][2].await_wanted((5, 5))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5, 7),
        torch.randn(300, 70),  # more than a page
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.randn(4, requires_grad=True),
    ],
    ids=lambda x: f"{tuple(x.shape)}",
)
def test_what_is_taken_is_what_was_given(tensor):
    here, there = both()
    spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
    here.give((2, 7), tensor, spec)
    found = there.take((2, 7), spec)
    assert torch.equal(found, tensor)
    assert found.dtype == tensor.dtype
    assert not found.requires_grad


def test_messages_are_told_apart_and_memory_is_used_again_once_they_are_taken():
    here, there = both()
    small, large = TensorSpec((10,), torch.float32), TensorSpec((5000,), torch.float32)
    for number in range(50):
        for kind, spec in ((0, small), (1, large), (2, small)):
            here.give((kind, number), torch.full(spec.shape, 100 * number + kind), spec)
        for kind, spec in ((2, small), (1, large), (0, small)):  # in another order
            assert torch.equal(there.take((kind, number), spec), torch.full(spec.shape, 100 * number + kind))
        there.want((0, number))
        assert here.await_wanted((0, number)) in (True, False)
    assert here._mine.end == 2 * wires._room(small) + wires._room(large)


def test_any_number_of_messages_may_wait_to_be_taken():
    here, there = both()
    spec = TensorSpec((1,), torch.float32)
    for number in range(270):  # more than fit one note
        here.give((0, number), torch.tensor([float(number)]), spec)
    assert [there.take((0, number), spec).item() for number in range(270)] == [*range(270)]
    there.give((1, 0), torch.tensor([1.0]), spec)
    assert here.take((1, 0), spec).item() == 1
    here.give((0, 270), torch.tensor([270.0]), spec)
    assert here._mine.end == 270 * wires._room(spec)


def test_two_that_say_more_than_fits_between_them_hear_each_other_meanwhile():
    found = []

    def say(end):
        for number in range(1000):
            end.want((0, number))
        end.await_wanted((0, 999))
        found.append(len(end._wanted))

    threads = [threading.Thread(target=say, args=[end], daemon=True) for end in both()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [999, 999]


def test_a_message_is_waited_for_until_it_is_wanted():
    here, there = both()
    there.want((0, 0))
    assert not here.await_wanted((0, 0))
    threading.Timer(0.05, there.want, [(0, 1)]).start()
    assert here.await_wanted((0, 1))


def test_what_one_has_given_before_it_went_is_there():
    here, there = both()
    spec = TensorSpec((4,), torch.float32)
    there.want((0, 0))  # which the other end never hears
    here.give((0, 0), torch.ones(4), spec)
    here.close()
    assert torch.equal(there.take((0, 0), spec), torch.ones(4))
    there.want((0, 1))  # nobody needs to know
    gone = "the next: the other process has closed its connection"
    with pytest.raises(PeerLost, match=gone) as caught, exchanging("the next", 1):
        there.take((0, 1), spec)
    assert caught.value.peers == (1,)
    with pytest.raises(ConnectionError):
        there.give((0, 1), torch.ones(4), spec)
    with pytest.raises(ConnectionError):
        there.await_wanted((0, 1))


def test_silence_is_told_after_the_timeout():
    here, _there = both(timedelta(seconds=0.01))
    with pytest.raises(PeerLost, match=r"^a message: nothing for 0.01 s$"), exchanging("a message", 0):
        here.take((0, 0), TensorSpec((4,), torch.float32))


def test_who_never_hears_is_told_of_after_the_timeout():
    here, _there = both(timedelta(seconds=0.01))

    def say():
        for number in range(10_000):
            here.want((0, number))

    with pytest.raises(TimeoutError, match=r"^nothing for 0.01 s$"):
        say()


@pytest.mark.parametrize("others", [None, ("another", "net"), ("this", "other")])
def test_ranks_that_cannot_all_have_wires_have_none(others, monkeypatch):
    def gathered(here):
        return [here, None if others is None else [*others, "", ""]]

    monkeypatch.setattr(wires, "_network", lambda: "net")
    monkeypatch.setattr(wires, "everybodys", gathered)
    assert wires.open_wires(0, [1], "this", PATIENT) is None


def shown_out(name, user):
    """Whether a process of ``user`` that connects and waits is shown out."""
    child = os.fork()
    if not child:
        try:
            os.setuid(user)
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.connect(name)
            os._exit(link.recv(1) != b"")
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_who_is_silent_or_says_something_else_or_is_another_user_keeps_nobody_waiting():
    listener, secret = wires._listener(), os.urandom(wires._SECRET)
    name = listener.getsockname()
    others = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
    _silent, wrong, short, right = others
    for link in others:
        link.connect(name)
    wrong.send(os.urandom(wires._SECRET) + wires._RANK.pack(1))
    short.send(secret[:8])
    found = []
    accepting = threading.Thread(
        target=lambda: found.append(wires._accepted(listener, secret, 1, PATIENT)), daemon=True
    )
    accepting.start()
    assert wrong.recv(1) == short.recv(1) == b"", "shown out"
    if os.geteuid() == 0:
        assert shown_out(name, 65534)
    assert not found
    right.send(secret + wires._RANK.pack(3))
    accepting.join(SECONDS)
    assert [*found[0]] == [3]
    found[0][3].send(b"hello")
    assert right.recv(5) == b"hello"


def test_peers_that_never_connect_are_told_of_after_the_timeout():
    with pytest.raises(TimeoutError, match=r"^nothing for 0.01 s$"):
        wires._accepted(wires._listener(), b"", 1, timedelta(seconds=0.01))
