"""Runs that read by a loader's workers: the same to all stages, and after a resume; nobody is left behind."""

import os
import re
import shutil
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cases import loaders
from cases import runtime as runtime_cases
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of

from pipeplan.errors import BadInput, CodeFailed, RunFailed
from pipeplan.report.tables.run import print_run
from pipeplan.runtime.data.loader import Loader
from pipeplan.runtime.device import CPU
from pipeplan.runtime.engine.asked import in_epochs
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.engine.reading import Reader, differing, repeatedly
from pipeplan.runtime.lowering.instructions import Forward
from pipeplan.runtime.lowering.lowered_run import Position, lower_run
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.contract import Samples, Span
from pipeplan.runtime.model.network import TensorSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.processes.own_processes import has_gone
from pipeplan.runtime.training.state.checkpoint import folder_of

MODEL = "cases.runtime:healthy"


@pytest.fixture(scope="module")
def plan():
    return plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0, 1)), (3, 6, (2,))], weights="flush", accumulate=2)


def losses(samples):
    """Those of a model that doesn't learn."""
    layers, _, loss = runtime_cases.healthy(4)
    net = torch.nn.Sequential(*layers)
    with torch.no_grad():
        return [float(loss(net(x), y)) for x, y in samples]


def test_workers_read_what_one_process_would_and_a_resumed_run_goes_on_with_it(plan, tmp_path, capsys):
    """Replicas have every other microbatch; inputs go to other ranks than targets. Five are cut to two updates."""
    model = ModelSpec(MODEL, "cases.loaders:shuffled")
    options = RunOptions(steps=1, lr=1e-12, seed=3, checkpoint=tmp_path / "c")
    options = in_epochs(options, plan, model, 2, None)
    assert (options.steps, options.epoch, options.every) == (4, 4, 2)
    whole = run_plan(plan, model, options)
    here = Loader("m:f", loaders.here, 4).read(Span(3, 0, 8, epoch=4))
    assert whole.losses == pytest.approx(losses(read.given for read in here), rel=1e-5)
    shutil.rmtree(tmp_path / "c" / folder_of(4))
    again = run_plan(
        plan, model, RunOptions(steps=4, lr=1e-12, seed=3, epoch=4, checkpoint=tmp_path / "c", resume=True)
    )
    assert again.losses == whole.losses[4:]
    assert [(read.rank, read.workers) for read in whole.reading] == [(0, 2), (1, 2), (2, 2)]
    assert all(read.read_ns >= 4e9 * loaders.SAMPLE_S for read in whole.reading)
    assert [stage.data_ns for stage in whole.stages] == [0, 0]
    first, last = (stage.data_wait_ns for stage in whole.stages)
    assert first > 0
    assert whole.calibrated_period_ns >= max(first / 2, last) > 0  # what is waited for is in the prediction
    print_run(plan, whole, width=120)
    assert "GPU 2: each of 2 workers reads a microbatch in" in capsys.readouterr().out


def test_a_stream_that_other_workers_would_share_otherwise_is_not_resumed(plan, tmp_path):
    folder, model = tmp_path / "c", ModelSpec(MODEL, "cases.loaders:lines")
    run_plan(plan, model, RunOptions(steps=1, lr=0.01, checkpoint=folder))
    other = ModelSpec(MODEL, "cases.loaders:lines_of_one")
    with pytest.raises(BadInput, match=r"was written with 2 loader workers, this run has 1, .* set num_workers=2"):
        run_plan(plan, other, RunOptions(steps=2, lr=0.01, checkpoint=folder, resume=True))
    run_plan(plan, model, RunOptions(steps=2, lr=0.01, checkpoint=folder, resume=True))


@pytest.mark.parametrize(("weights", "accumulate"), [("flush", 5), ("stash", 6), ("flush", 6)])
def test_samples_are_read_where_their_passes_run(weights, accumulate):
    """Replicas take turns from where the pipeline was empty, whatever has been trained before."""
    chain = chain_of(runtime_cases.healthy, 4)
    plan = plan_of(chain, [(0, 3, (0, 1)), (3, 6, (2, 3, 4))], weights=weights, accumulate=accumulate)
    first = Position(3, 3 * accumulate + 1)
    lowered = lower_run(plan, 8, every=2, first=first)
    model = SimpleNamespace(read_by=lambda s: {} if s else {0: (0, None)}, data=SimpleNamespace(source=None))
    for rank, instructions in enumerate(lowered.instructions):
        stages = [s for s in (0, 1) if rank in lowered.ranks_of(s)]
        own = {"lowered": lowered, "stages": stages, "number": rank, "model": model, "device": CPU}
        reader = Reader(SimpleNamespace(options=RunOptions(1, 0.1)), SimpleNamespace(stage=lambda s: s, **own))
        read = [m for m in range(first.microbatch, lowered.last.microbatch) if reader._times(m)]
        assert read == sorted(x.microbatch for x in instructions if isinstance(x, Forward))


def test_a_stream_that_workers_share_out_is_read_again_and_again(plan):
    """Of 11 samples each worker makes two microbatches; they take turns."""
    found = run_plan(plan, ModelSpec(MODEL, "cases.loaders:lines"), RunOptions(steps=4, lr=1e-12))
    numbers = [[worker + 2 * (4 * turn + k) for k in range(4)] for turn in range(2) for worker in range(2)]
    passes = [torch.tensor(x, dtype=torch.float32)[:, None].expand(4, 16) for x in numbers + numbers]
    assert found.losses == pytest.approx(losses((x, -x) for x in passes), rel=1e-5)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists a process's children")
def test_a_sample_that_fails_in_a_worker_is_told_and_no_worker_stays(plan):
    words = r"cases.loaders:failing: ValueError: sample 13 is torn for ([\d ]+) \(.*loaders.py:\d+\)"
    with pytest.raises(RunFailed, match=words) as caught:
        run_plan(plan, ModelSpec(MODEL, "cases.loaders:failing"), RunOptions(steps=4, lr=0.1))
    pids = [int(pid) for pid in re.search(words, str(caught.value))[1].split()]
    assert len(pids) == 2
    until = time.monotonic() + SECONDS
    while not all(map(has_gone, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(map(has_gone, pids))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists a process's children")
def test_of_a_run_with_spawned_workers_that_is_killed_one_sentence_is_told():
    """Neither what workers say that were sending something, nor who removes their semaphores."""
    code = "from cases.loaders import killing; killing('run'); killing('rank')"
    roots = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    words = r"the run is stopped\nrank 0 died .*: killed by SIGKILL, perhaps for want of memory"
    assert re.fullmatch(words, found.stdout.strip())
    assert not found.stderr


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("eight", {}, "cases.loaders:eight: its DataLoader has batches of 8 samples, the profile microbatches of 4"),
        ("by_chance", {}, "ranks 0 and 2 read different samples for microbatch 0"),
    ],
)
def test_what_no_run_can_read_ends_it(plan, data, options, words):
    with pytest.raises(BadInput, match=words):
        run_plan(plan, ModelSpec(MODEL, f"cases.loaders:{data}"), RunOptions(steps=2, lr=0.1, **options))


def test_an_epoch_shorter_than_an_update_is_refused(plan):
    with pytest.raises(BadInput, match="--epochs: an epoch has 1 microbatches, fewer than the 2 of one update"):
        in_epochs(RunOptions(steps=1, lr=0.1), plan, ModelSpec(MODEL, "cases.loaders:few"), 2, 1)
    with pytest.raises(BadInput, match=r"cases.loaders:few: has fewer samples than the 4 of one microbatch"):
        in_epochs(RunOptions(steps=1, lr=0.1), plan, ModelSpec(MODEL, "cases.loaders:few"), 2, None)


def test_workers_end_with_who_reads_whatever_they_do():
    data = Samples(Loader("m:f", loaders.shuffled, 4), lambda index, given: ((given[0],), given[1]))
    model = SimpleNamespace(data=data, read_by=lambda s: {0: (0, None)}, specs={0: TensorSpec((4, 16), torch.float32)})
    options = SimpleNamespace(seed=0, epoch=None)
    chain = chain_of(runtime_cases.healthy, 4)
    lowered = lower_run(plan_of(chain, [(0, 6, (0,))], weights="flush", accumulate=2), 100)
    rank = SimpleNamespace(lowered=lowered, stages=[0], number=0, stage=lambda s: s, model=model, device=CPU)
    reader = Reader(SimpleNamespace(options=options), rank)
    assert reader.begin()[0] == 0
    assert [reader.take(m)[0][0].shape for m in range(3)] == [(4, 16)] * 3
    workers = active_children()
    assert len(workers) == 2
    assert reader.close()[0] == 2
    assert all(has_gone(worker.pid) for worker in workers)


def test_a_worker_that_dies_as_it_hands_over_is_told_of(monkeypatch):
    def torn(self):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", torn)
    loader, span = Loader("m:f", loaders.shuffled, 4), Span(0, 0, 8)
    with pytest.raises(CodeFailed, match=r"^m:f: a worker of its DataLoader died, perhaps for want of memory$"):
        next(loader.read(span, by_workers=True))


def test_ranks_that_read_otherwise_are_named():
    assert differing([(0, "a"), (1, "b"), None, (0, "a")]) is None
    assert "ranks 1 and 3 read different samples for microbatch 1" in differing([None, (1, "b"), (0, "a"), (1, "c")])


def test_data_that_differ_between_nodes_end_the_run_before_it_begins(plan):
    words = "data: ranks 0 and 1 read different samples for microbatch 0; every node needs the same files"
    with pytest.raises(BadInput, match=words):
        run_plan(plan, ModelSpec(MODEL, "cases.runtime:vectors_of_this_rank"), RunOptions(steps=1, lr=0.1))


def test_data_that_fail_when_they_are_read_again_are_told_of_in_one_sentence():
    def data(index, seed):
        raise ValueError("read twice")

    read = repeatedly(data)
    assert read is not None
    with pytest.raises(CodeFailed, match=r"^data: ValueError: read twice \("):
        read()
