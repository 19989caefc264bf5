from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from pipeplan.runtime.device import DeviceWaits
from pipeplan.runtime.engine.executor import OperationFailed
from pipeplan.runtime.lowering.instructions import Forward
from pipeplan.runtime.measure import recorder as module
from pipeplan.runtime.measure.recorder import CudaRecorder, Recorder, Times
from pipeplan.runtime.measure.times import Compared, OpTime, straightened
from pipeplan.runtime.processes.messages import failure_of

MS = 10**6
PATIENCE = timedelta(seconds=0.01)


class Gpu:
    """A queue of work whose events are reached when somebody waits for them; ``now`` is the host's clock in ns."""

    def __init__(self):
        self.now = 5 * MS
        self.queued_ns = self.now  # when all that is queued will be done
        self.waits, self.hangs = 0, False
        self.fast = 0.0  # how much too long the GPU's own clock finds what it measures
        self.late_ns = 0  # how much later the host hears of what it waits for

    def work(self, ns):
        """Queue a kernel; the host goes on at once."""
        self.queued_ns = max(self.queued_ns, self.now) + ns

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, None

    def record(self):
        self.at = max(self.gpu.queued_ns, self.gpu.now)

    def query(self):
        if self.at > self.gpu.now and not self.gpu.hangs:
            self.gpu.now = self.at + self.gpu.late_ns  # as long as the host pauses until it looks again
            return False
        self.gpu.waits += 1
        return not self.gpu.hangs

    def elapsed_time(self, other):
        assert max(self.at, other.at) <= self.gpu.now, "torch raises for an event that is not reached"
        distance = (other.at - self.at) * (1 + self.gpu.fast)
        return torch.tensor(distance / 1e6, dtype=torch.float32).item()  # as torch's: a float in ms


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: found.now)
    return found


def test_times_of_a_gpu_are_those_of_its_queue_in_the_clock_of_the_host(gpu):
    recorder = CudaRecorder(PATIENCE, offset_ns=1000 * MS, ahead=100)
    for m in range(3):
        gpu.now += MS  # the host takes 1 ms to issue what takes the GPU 4 and 8
        start = recorder.mark()
        gpu.work(4 * MS)
        recorder.note("F", 0, m, start)
        start = recorder.mark()
        gpu.work(8 * MS)
        recorder.note("B", 0, m, start)
    issued = gpu.now
    times = list(recorder.settle())
    assert issued == 8 * MS
    assert gpu.now == 42 * MS, "settling waits for the GPU"
    assert [(t.activity, t.microbatch, t.start_ns / MS, t.end_ns / MS) for t in times] == [
        ("F", 0, 1006, 1010), ("B", 0, 1010, 1018), ("F", 1, 1018, 1022), ("B", 1, 1022, 1030), ("F", 2, 1030, 1034),
        ("B", 2, 1034, 1042),
    ]  # fmt: skip


def test_a_long_run_loses_no_precision(gpu):
    """A float in ms has 24 bits: after an hour the distance from the start is told in quarters of a millisecond."""
    recorder = CudaRecorder(PATIENCE, ahead=4)
    for m in range(3600):
        gpu.work(10**9 - 1234)
        start = recorder.mark()
        gpu.work(1234)
        recorder.note("F", 0, m, start)
    times = list(recorder.settle())
    assert abs(times[-1].end_ns - (3600 * 10**9 + 5 * MS)) < 3600 * 100
    assert all(abs(t.duration_ns - 1234) <= 1 for t in times)


@pytest.mark.parametrize("fast", [50e-6, -50e-6])
def test_a_clock_that_runs_away_is_set_right_again(gpu, fast):
    """The host hears of what it waits for 10 to 70 us later; at the end it knows how fast the clock was."""
    gpu.fast, gpu.late_ns = fast, 10_000
    recorder = CudaRecorder(PATIENCE, ahead=1)
    begun = gpu.now
    ends = []
    for m in range(1200):
        start = recorder.mark()
        gpu.work(50 * MS)
        ends.append(gpu.queued_ns)
        recorder.note("F", 0, m, start)
        gpu.late_ns = 10_000 + 60_000 * (m % 7 == 3)
    told = list(recorder.settle())
    assert gpu.now - begun >= 60 * 10**9
    assert abs(told[-1].end_ns - ends[-1]) > 2_900_000, "3 ms in a minute"
    times = straightened(told, Compared(0, begun), Compared(recorder.lag_ns, gpu.now))
    assert max(abs(t.end_ns - end) for t, end in zip(times, ends, strict=True)) < 20_000
    assert all(t.duration_ns > 0 for t in times)


def test_hosts_whose_clocks_run_apart_are_set_right_evenly():
    told = [OpTime("F", 0, 0, 1500, 1600), OpTime("B", 0, 0, 2000, 3500)]  # 500 are to be added from 1000 on
    same = straightened(told, Compared(500, 1000), Compared(500, 3000))
    assert same == told
    right = straightened(told, Compared(500, 1000), Compared(700, 3000))  # and 700 at 3000
    assert [(t.start_ns, t.end_ns) for t in right] == [(1500, 1610), (2050, 3700)]


def test_the_host_runs_no_more_than_so_many_notes_ahead(gpu):
    recorder = CudaRecorder(PATIENCE, ahead=3)
    done = []
    gpu.waits = 0
    for k in range(10):
        gpu.work(MS)
        recorder.later(lambda k=k: done.append((k, gpu.now)))
        assert len(done) == max(0, k - 2)
        assert gpu.waits == len(done)
    assert [k for k, _ in done] == list(range(7))
    assert all(now == 5 * MS + (k + 1) * MS for k, now in done), "each when the GPU had come so far, and no later"
    recorder.settle()
    assert [k for k, _ in done] == list(range(10))


def test_what_an_action_raises_comes_out_where_the_host_waits(gpu):
    recorder = CudaRecorder(PATIENCE, ahead=1)

    def refuse():
        raise ArithmeticError("the loss is nan")

    recorder.later(refuse)
    with pytest.raises(ArithmeticError, match="nan"):
        recorder.later(lambda: None)


def test_a_gpu_that_never_gets_on_is_not_waited_for_for_ever(gpu):
    """As one does that waits for a message of a rank that has gone: the host itself waits nowhere else."""
    recorder = CudaRecorder(PATIENCE, ahead=1)
    recorder.later(lambda: None)
    gpu.hangs = True
    with pytest.raises(DeviceWaits, match=r"^the GPU has waited for 0.01 s$") as caught:
        recorder.later(lambda: None)
    lost = OperationFailed(Forward(1, 7, 2))
    lost.__cause__ = caught.value
    failure = failure_of(3, lost)
    assert failure.kind == "lost"
    words = "rank 3 lost another rank in the forward of microbatch 7 on stage 1: the GPU has waited for 0.01 s"
    assert failure.message == words


def test_a_cpu_does_everything_at_once(gpu):
    recorder = Recorder(offset_ns=7)
    done = []
    start = recorder.mark()
    gpu.now += 5
    recorder.note("B", 1, 2, start)
    recorder.later(lambda: done.append(1))
    assert done == [1]
    (time,) = recorder.settle()
    assert (time.stage, time.microbatch, time.start_ns, time.end_ns) == (1, 2, 5 * MS + 7, 5 * MS + 12)


def test_a_long_run_keeps_its_begin_and_its_end():
    times = Times(kept=3)
    operations = [OpTime("F", 0, m, m, m + 1) for m in range(10)]
    for count, operation in enumerate(operations, 1):
        times.add(operation)
        assert times.forgotten == max(0, count - 6)
    assert list(times) == operations[:3] + operations[-3:]
