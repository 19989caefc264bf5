"""Checkpoints that were made to do harm, and what a state may hold at all: nothing is executed."""

import os
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.checkpoints import resummed
from cases.saved_runs import FILES, LAST, MODEL, OPTIONS, folder, one_rank, passed_over, plan, state_of, written
from torch.optim import lr_scheduler

from pipeplan.errors import BadInput, RunFailed
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.lowering.lowered_run import Position
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import ABOUT, FileSum, begin, crc_of, file_of, finish, newest
from pipeplan.runtime.training.state.state import _take_up, check_savable
from pipeplan.runtime.training.state.written import TrainingState, _alone, check_rates, read, unreadable, write
from pipeplan.runtime.training.update.stepper import Rates


class Planted:
    """Whoever unpickles it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def state_with(planted):
    return {"model": {"0.weight": planted}, "optimizer": {}, "random": None, "rates": None, "scale": None}


PLANTS = {
    "a pickle": lambda path, planted: path.write_bytes(pickle.dumps(planted)),
    "in a file of torch's": lambda path, planted: torch.save(state_with(planted), path),
    "in an old file of torch's": lambda path, planted: torch.save(
        state_with(planted), path, _use_new_zipfile_serialization=False
    ),
    "in the rates": lambda path, planted: torch.save(state_with(None) | {"rates": (planted, planted)}, path),
    "in the optimizer's state": lambda path, planted: torch.save(
        state_with(None) | {"optimizer": {"0.weight": planted}}, path
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", FILES)
def test_nothing_that_is_planted_is_executed(plant, name, folder, tmp_path, one_rank):
    """Whether the checksums fit or not. The plant does work where it isn't guarded against."""
    mark = tmp_path / "planted"
    path = folder / LAST / name
    PLANTS[plant](path, Planted(mark))
    (folder / LAST / ".metadata").write_bytes(pickle.dumps(Planted(mark)))
    assert passed_over(folder).startswith(f"{name}: ")
    if name != ABOUT:
        resummed(folder / LAST)
        with pytest.raises(BadInput, match=rf"^{path}: cannot be read: "):
            read(newest(folder), {"0.weight": torch.zeros(16, 16)}, {"0.weight"})
    assert not mark.exists()
    torch.load(path, weights_only=False) if plant != "a pickle" else pickle.loads(path.read_bytes())
    assert mark.exists()


def test_a_run_that_goes_on_from_a_hostile_folder_executes_nothing(folder, plan, tmp_path):
    mark = tmp_path / "planted"
    for name in FILES[1:]:
        PLANTS["in the rates"](folder / LAST / name, Planted(mark))
    resummed(folder / LAST)
    notes = []
    run_plan(plan, MODEL, RunOptions(steps=6, checkpoint=folder, resume=True, **OPTIONS), note=notes.append)
    words = rf"damaged, and passed over: {folder / LAST}/rank-0000\d.pt: cannot be read: UnpicklingError: .*open"
    assert any(re.match(words, note) for note in notes)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        [], {}, {"model": []}, state_with(3), state_with(None) | {"more": 1},
        state_with(torch.zeros(3)) | {"optimizer": [1]}, state_with(torch.empty(16, 16, device="meta")),
        state_with(torch.zeros(16, 16, dtype=torch.complex64).to_sparse()),
        state_with(torch.zeros(16, 16)) | {"optimizer": {"0.weight": torch.zeros(1).expand(10**12)}},
    ],
    ids=str,
)  # fmt: skip
def test_states_of_other_kinds_are_bad_input(content, folder, one_rank):
    torch.save(content, folder / LAST / FILES[1])
    torch.save(state_with(None) | {"model": {}}, folder / LAST / FILES[2])
    resummed(folder / LAST)
    with pytest.raises(BadInput, match=rf"^{folder / LAST}"):
        read(newest(folder), {"0.weight": torch.zeros(16, 16)}, {"0.weight"})


@pytest.mark.parametrize("content", [{"rates": ([], None)}, {"rates": (3, 4)}, {"random": torch.zeros(3)}], ids=str)
def test_what_does_not_fit_the_run_is_bad_input(content, folder, plan):
    for name in FILES[1:]:
        path = folder / LAST / name
        torch.save(torch.load(path) | content, path)
    resummed(folder / LAST)
    with pytest.raises(BadInput, match=rf"^{folder / LAST}"):
        run_plan(plan, MODEL, RunOptions(steps=6, checkpoint=folder, resume=True, **OPTIONS))


SCHEDULES = {
    "LambdaLR": {"lr_lambda": lambda step: np.float64(0.9) ** step},
    "MultiplicativeLR": {"lr_lambda": lambda step: np.float32(0.9)},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_goes_on(name, tmp_path, one_rank):
    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return (
            Rates([], lambda _: optimizer, None),
            optimizer,
            getattr(lr_scheduler, name)(optimizer, **SCHEDULES[name]),
        )

    def rates(steps, schedule):
        found = []
        for _ in range(steps):
            schedule.optimizer.step()
            schedule.step()
            found.append(schedule.get_last_lr())
        return found

    _, optimizer, schedule = made()
    rates(2, schedule)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    check_rates(groups, schedule.state_dict())
    write(tmp_path, Position(2, 4), "test", 0, state_of((groups, schedule.state_dict())), None, set())
    found = read(newest(tmp_path), {}, set())
    _, other, again = made()
    other.param_groups[0].update(found.rates[0][0])
    again.load_state_dict(found.rates[1])
    assert rates(4, again) == rates(4, schedule)


@pytest.mark.parametrize(
    "value", [np.zeros(3), Planted("x"), lambda: 0, os.getcwd], ids=["array", "object", "lambda", "f"]
)
def test_a_state_that_could_not_be_loaded_safely_is_refused_at_the_start(value, tmp_path, one_rank):
    with pytest.raises(BadInput, match=r"^checkpoint: the optimizer's or the schedule's state has more than"):
        check_rates([{"lr": 0.1}], {"mine": value})
    stages = SimpleNamespace(plan=SimpleNamespace(allocation=SimpleNamespace(stages=(0, 1))))
    rank = SimpleNamespace(lowered=stages, modules=lambda s: [torch.nn.Linear(1, 1)], first_of={0})
    rates = SimpleNamespace(groups=[{"lr": 0.1}], schedule={"mine": value})
    updates = {0: SimpleNamespace(stepper=SimpleNamespace(rates=rates))}
    with pytest.raises(BadInput, match=r"^checkpoint: the optimizer's or the schedule's state has more than"):
        check_savable(rank, updates)
    rank.first_of = {1}
    check_savable(rank, updates)  # which another rank writes
    with pytest.raises(RunFailed, match=r"step-00000002 cannot be written by rank 0 .* has more than tensors"):
        write(tmp_path, Position(2, 4), "test", 0, state_of(([], value)), None, set())
    assert newest(tmp_path) is None


def test_tensors_are_written_without_what_lies_beside_them(tmp_path, one_rank):
    large = torch.randn(10**6)
    shared = large[:9]
    whole = torch.randn(2000)
    weights = {"a": shared.view(3, 3), "b": shared, "c": torch.tensor(1.5), "d": torch.nn.Parameter(torch.zeros(0, 2))}
    weights |= {"e": large[:: 10**5], "f": shared.view(3, 3).t(), "g": whole, "h": whole, "i": large[:4] > 0}
    write(tmp_path, Position(1, 1), "test", 0, state_of(**weights), None, set())
    assert newest(tmp_path).files["rank-00000.pt"].bytes < 2 * 10**4, "nor twice what two have"
    found = {name: torch.empty_like(x, requires_grad=False) for name, x in weights.items()}
    read(newest(tmp_path), found, set())
    assert all(torch.equal(found[name], x) for name, x in weights.items())
    assert _alone(shared).data_ptr() == shared.data_ptr(), "without a copy"


def test_all_that_a_rank_takes_up_is_what_the_files_have(tmp_path, one_rank):
    """Of two ranks' files, here one rank's: no random state, and of what is in several the first."""
    partial, sums, good = begin(tmp_path, 3), [], {1}
    shared = {"shares": 2, "trial": (0.5, 2, 1), "rates": ([{"lr": 1.0}], {}), "scale": (4.0, 3)}
    for rank, more in enumerate(({"shares": None}, shared)):
        state = {"model": {f"w{rank}": torch.full((2,), 1.0 + rank)}, "random": torch.get_rng_state(), **more}
        torch.save(
            {**state, "optimizer": {f"w{rank}": {"step": rank, "sum": torch.ones(4)}, "x": {}}}, partial / file_of(rank)
        )
        sums.append(FileSum((partial / file_of(rank)).stat().st_size, crc_of(partial / file_of(rank))))
    finish(partial, Position(3, 12), "m", 0, sums)
    found = newest(tmp_path, unreadable=unreadable)
    weights = {"w0": torch.zeros(2), "w1": torch.zeros(2)}
    told = read(
        found, weights, {"w0", "w1"}, lambda name, x: x[:2] if name == "w1" and isinstance(x, torch.Tensor) else x
    )
    assert [x.tolist() for x in weights.values()] == [[1, 1], [2, 2]]
    assert {name: x["sum"].numel() for name, x in told.optimizer.items()} == {"w0": 4, "w1": 2}
    assert (told.model, told.random, told.rates, told.scale, told.shares, told.trial) == (
        {}, None, ([{"lr": 1.0}], {}), (4.0, 3), 2, (0.5, 2, 1),
    )  # fmt: skip
    place = f"{tmp_path}/step-00000003"
    for name, size, words in (("w0", 3, "w0 has shape (2,)"), ("w2", 2, "w2 is not there")):
        with pytest.raises(BadInput, match=re.escape(f"{place}: {words}; the model's has shape ({size},)") + "$"):
            read(found, {name: torch.zeros(size)}, set())
    state = TrainingState({"w": torch.ones(2)}, {}, torch.get_rng_state())
    write(tmp_path, Position(5, 20), "m", 0, state, 1, good, "a plan")
    assert good == {1, 5}
    assert [x.name for x in tmp_path.iterdir()] == ["step-00000005"]
    assert (tmp_path / "step-00000005" / "plan.json").read_text() == "a plan"
    own = read(newest(tmp_path), {"w": torch.zeros(2)}, set())
    assert torch.equal(own.random, torch.get_rng_state())
    assert own.trial is own.shares is own.rates is own.scale is None
    path = tmp_path / "step-00000005" / "rank-00000.pt"
    assert unreadable(path) is None
    path.write_bytes(b"no file of torch's")
    assert unreadable(path).startswith(f"{path}: cannot be read: ")


def test_a_loss_scale_is_taken_up_where_there_is_one_and_somebody_who_scales():
    taken, given = [], {}
    scaling = SimpleNamespace(resume=lambda *scale: taken.append(scale))
    for scale, who in ((None, scaling), ((4.0, 3), None), ((4, 3.0), scaling)):
        _take_up(TrainingState({}, {}, None, scale=scale), SimpleNamespace(), {}, who)
    assert taken == [(4.0, 3)]
    assert [type(x) for x in taken[0]] == [float, int]
    stepper = SimpleNamespace(restore_state=lambda index, entries: given.update({index: entries}), take_masters=int)
    rank = SimpleNamespace(names=lambda s: {f"w{s}": "w"})
    updates = {
        s: SimpleNamespace(stepper=stepper, versions=SimpleNamespace(place_of=lambda weight: int(weight[1:])))
        for s in (3, 5, 7)
    }
    entries = {"sum": torch.ones(2)}
    _take_up(TrainingState({}, {"w": entries}, None), rank, updates, None)
    assert given[3] is entries
    assert len({x["sum"].data_ptr() for x in given.values()}) == 3, "each steps its own"
