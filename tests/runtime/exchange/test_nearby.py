"""What two processes of one machine give each other: nothing is lost, memory is used again, who goes is noticed."""

import json
import os
import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from cases.patience import SECONDS

from pipeplan.runtime.exchange import nearby
from pipeplan.runtime.exchange.transport import PeerLost, exchanging
from pipeplan.runtime.model.network import TensorSpec

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared on Linux")
PATIENT = timedelta(seconds=SECONDS)


def opened(pairs, timeout=PATIENT):
    """What each rank of ``pairs`` (rank, peer) has opened, by rank; all say at the same moment what they have."""
    ranks = sorted({rank for pair in pairs for rank in pair})
    met, found = threading.Barrier(len(ranks), timeout=SECONDS), {}
    said = [None] * len(ranks)

    def everybodys(value):
        said[int(threading.current_thread().name)] = value
        met.wait()
        everybody = json.loads(json.dumps(said))
        met.wait()
        return everybody

    def open_ends(rank):
        found[rank] = nearby.open_nearby(rank, [other for one, other in pairs if one == rank], "this", timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearby, "everybodys", everybodys)
        threads = [threading.Thread(target=open_ends, args=[rank], name=str(rank), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    return found


def both(timeout=PATIENT):
    """The two ends of a wire."""
    ends = opened([(0, 1), (1, 0)], timeout)
    return ends[0][1], ends[1][0]


def test_three_that_open_their_wires_in_a_circle_come_through():
    ends = opened([(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)])
    assert {rank: set(own) for rank, own in ends.items()} == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
    spec = TensorSpec((1,), torch.float32)
    ends[2][0].give((5, 5), torch.ones(1), spec)
    assert ends[0][2].take((5, 5), spec).item() == 1


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
        here.await_room(0, 1)  # and so for all that was taken before it
    assert here._mine.end == 2 * nearby._room(small) + nearby._room(large)


def test_any_number_of_messages_may_wait_to_be_taken():
    here, there = both()
    spec = TensorSpec((1,), torch.float32)
    for number in range(270):  # more than fit one note
        here.give((0, number), torch.tensor([float(number)]), spec)
    assert [there.take((0, number), spec).item() for number in range(270)] == [*range(270)]
    there.give((1, 0), torch.tensor([1.0]), spec)
    assert here.take((1, 0), spec).item() == 1
    here.give((0, 270), torch.tensor([270.0]), spec)
    assert here._mine.end == 270 * nearby._room(spec)


def test_two_that_say_more_than_fits_between_them_hear_each_other_meanwhile():
    found = []

    def say(end):
        for number in range(3000):
            end.give((0, number), torch.ones(()), spec)
        found.append(sum(end.take((0, number), spec) for number in range(2900, 3000)))

    spec = TensorSpec((), torch.float32)

    threads = [threading.Thread(target=say, args=[end], daemon=True) for end in both()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [100, 100]


def test_room_is_waited_for_until_enough_is_taken():
    here, there = both()
    spec = TensorSpec((1,), torch.float32)
    for number in range(2):
        here.give((0, number), torch.ones(1), spec)
    there.take((0, 0), spec)
    assert not here.await_room(0, 2)
    here.give((0, 2), torch.ones(1), spec)
    threading.Timer(0.05, there.take, [(0, 1), spec]).start()
    assert here.await_room(0, 2)
    assert not here.await_room(1, 2)


def test_what_one_has_given_before_it_went_is_there():
    here, there = both()
    spec = TensorSpec((4,), torch.float32)
    here.give((0, 0), torch.ones(4), spec)
    here.close()
    assert torch.equal(there.take((0, 0), spec), torch.ones(4))  # which nobody needs to know
    gone = "the next: the other process has closed its connection"
    with pytest.raises(PeerLost, match=gone) as caught, exchanging("the next", 1):
        there.take((0, 1), spec)
    assert caught.value.peers == (1,)
    with pytest.raises(ConnectionError):
        there.give((0, 1), torch.ones(4), spec)
    there._untaken[0] = 2
    with pytest.raises(ConnectionError):
        there.await_room(0, 2)


def test_silence_is_told_after_the_timeout():
    here, _there = both(timedelta(seconds=0.01))
    with pytest.raises(PeerLost, match=r"^a message: nothing for 0.01 s$"), exchanging("a message", 0):
        here.take((0, 0), TensorSpec((4,), torch.float32))


def test_who_never_hears_is_told_of_after_the_timeout():
    here, _there = both(timedelta(seconds=0.01))

    def say():
        for number in range(10_000):
            here._note(nearby._TAKEN, (0, number), 0)
            here._say()

    with pytest.raises(TimeoutError, match=r"^nothing for 0.01 s$"):
        say()


@pytest.mark.parametrize("others", [None, ["another", "processes", 1, {}], ["this", "others", 1, {}]])
def test_ranks_that_cannot_all_have_wires_have_none(others, monkeypatch):
    monkeypatch.setattr(nearby.os, "readlink", lambda path: "processes")
    monkeypatch.setattr(nearby, "everybodys", lambda here: [here, others if isinstance(here, list) else here])
    assert nearby.open_nearby(0, [1], "this", PATIENT) is None


def test_one_that_may_not_look_into_another_lets_all_do_without():
    real = os.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            nearby.os, "open", lambda *given: refused() if int(threading.current_thread().name) else real(*given)
        )
        assert opened([(0, 1), (1, 0)]) == {0: None, 1: None}


def refused():
    raise PermissionError


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_cannot_open_what_is_there():
    here, _there = both()
    child = os.fork()
    if not child:
        os.setuid(65534)
        try:
            os.open(f"/proc/{os.getppid()}/fd/{here._says}", os.O_WRONLY)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
