"""Optimizer state in host memory, stepped bucket by bucket: the same bits, and as little memory as promised."""

from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.runtime import chain_of, largest_difference, plan_of, uncorrected
from oracles.host_memory import most_bytes
from torch import nn

from pipeplan.cost import memory_model
from pipeplan.errors import BadInput, RunFailed
from pipeplan.plan import Stage
from pipeplan.runtime.device import CPU
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.written import _load, _save
from pipeplan.runtime.training.update.offload import host_rooms
from pipeplan.runtime.training.update.optimizers import Choice, optimizer_maker, parse_choice, schedule_maker
from pipeplan.runtime.training.update.stepper import ELEMENTWISE, Stepping, stepper_kind
from pipeplan.runtime.training.weights.buckets import cut_into_buckets
from pipeplan.runtime.training.weights.versions import Versions

MODEL = ModelSpec("cases.runtime:dropping", "cases.runtime:vectors")


def kept(plan, **policy):
    return replace(plan, policy=replace(plan.policy, **policy))


def test_buckets_cover_every_element_once_and_never_mix_types():
    weights = [torch.zeros(3, 5), torch.zeros(4, dtype=torch.float64), torch.zeros(0), torch.zeros(7), torch.zeros(1)]
    for size in (1, 4, 5, 22, 23, 24, 100, None):
        buckets = cut_into_buckets(weights, size)
        seen = [[0] * x.numel() for x in weights]
        for bucket in buckets:
            assert sum(span.size for span in bucket.slices) == bucket.size == bucket.stop - bucket.start
            for span in bucket.slices:
                assert weights[span.index].dtype == bucket.dtype
                for element in range(span.start, span.stop):
                    seen[span.index][element] += 1
        assert all(count == 1 for one in seen for count in one)
        sizes = [bucket.size for bucket in buckets if bucket.dtype == torch.float32]
        limit = 23 if size is None else size
        assert sizes == [limit] * (23 // limit) + [23 % limit] * bool(23 % limit)


def test_offloaded_state_is_saved_without_a_copy():
    rooms = host_rooms([(1000, 9), (), (0,), (7,)] * 2, [torch.float32] * 4 + [torch.bfloat16] * 4, CPU)
    for i, room in enumerate(rooms):
        room.fill_(i)
    kept, file = {"state": rooms, "transposed": rooms[0].t()[2:4]}, BytesIO()
    held, _ = most_bytes(lambda: _save(kept, file))
    assert held <= rooms[0][:, :2].nbytes + 1000, "but for what has gaps"
    assert len(file.getvalue()) < 60_000 + 2 * rooms[0][:, :2].nbytes, "of their memory as much as is theirs"
    file.seek(0)
    found = _load(file)
    assert all(map(torch.equal, (*found["state"], found["transposed"]), (*rooms, kept["transposed"])))


@pytest.mark.parametrize("size", [1, 7, 20, 1000])
@pytest.mark.parametrize("kind", [kind.__name__ for kind in ELEMENTWISE] + ["momentum", "amsgrad"])
def test_any_elementwise_optimizer_gives_the_same_bits_in_buckets(kind, size):
    names = {"momentum": "SGD,momentum=0.9,nesterov=True,weight_decay=0.1", "amsgrad": "AdamW,amsgrad=True"}
    make = optimizer_maker(parse_choice(names.get(kind, kind), "here"), 0.05)
    schedule = schedule_maker(parse_choice("StepLR,step_size=2,gamma=0.5", "here"))
    torch.manual_seed(0)
    values = [torch.randn(3, 7), torch.randn(31), torch.randn(1), torch.randn(2, 1, 3)]
    plain, parts = (
        stepper_kind(versions, how)(versions, make, schedule, how)
        for versions, how in (
            (Versions([nn.ParameterList(x.clone() for x in values)]), how)
            for how in (Stepping(), Stepping(bucket=size, offload=True))
        )
    )
    for _ in range(3):
        gradients = [torch.randn(x.shape) for x in values]
        gradients[2] = None  # a weight that no pass has used
        for stepper in (plain, parts):
            for part in stepper.parts(tied=True):
                stepper.step(part, gradients)
            stepper.finish()
    assert parts.every == len(cut_into_buckets(values, size))
    for index in range(len(values)):
        assert torch.equal(plain.master(index), parts.master(index))
        before, after = plain.state_of(index), parts.state_of(index)
        assert before.keys() == after.keys()
        assert all(torch.equal(torch.as_tensor(before[key]), torch.as_tensor(after[key])) for key in before)
    assert plain.rates.groups == parts.rates.groups
    assert plain.rates.schedule == parts.rates.schedule


def test_locked_host_memory_is_as_large_as_what_it_is_for(monkeypatch):
    locked = {}
    driver = SimpleNamespace(
        cudaHostRegister=lambda place, size, _: 0 if locked.setdefault(place, size) else 1,
        cudaHostUnregister=locked.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    shapes, dtypes = [(3, 5), (0,), (7,), (1, 1)], [torch.float32, torch.float32, torch.float64, torch.float32]
    rooms = host_rooms(shapes, dtypes, torch.device("cuda", 0))
    assert [(tuple(room.shape), room.dtype) for room in rooms] == list(zip(shapes, dtypes, strict=True))
    assert sorted(locked.values()) == [7 * 8, 16 * 4]
    for index, room in enumerate(rooms):
        room.fill_(index)
    assert all(bool((room == index).all()) for index, room in enumerate(rooms)), "none lies over another"
    del room, rooms
    assert locked == {}
    driver.cudaHostRegister = lambda *_: 2
    with pytest.raises(RunFailed, match=r"^8 bytes of host memory .* cannot be locked \(CUDA error 2\)$"):
        host_rooms([(2,)], [torch.float32], torch.device("cuda", 0))


LAYOUTS = {
    "flush": {"stages": [(0, 2, (0,)), (2, 5, (1,))], "weights": "flush", "accumulate": 3},
    "2bw": {"stages": [(0, 2, (0,)), (2, 5, (1,))], "weights": "2bw"},
    "several stages": {"stages": [(0, 1, (0,)), (1, 3, (1,)), (3, 5, (0,))], "weights": "flush", "accumulate": 2},
    "replicas": {"stages": [(0, 3, (0, 1)), (3, 5, (2,))], "weights": "flush", "accumulate": 4},
}


@pytest.mark.parametrize(
    ("layout", "optimizer", "sizes"),
    [
        ("flush", "adam", (16, 10**6)),
        ("2bw", "momentum", (100,)),
        ("several stages", "adam", (100,)),
        ("replicas", "adam", (100,)),
    ],
)
def test_offloading_changes_no_bit(layout, optimizer, sizes, tmp_path):
    plan = plan_of(chain_of(runtime_cases.dropping, 4), **LAYOUTS[layout], optimizer=optimizer)
    options = {"steps": 4, "lr": 0.05, "scheduler": parse_choice("StepLR,step_size=2,gamma=0.5", "here")}
    plain = run_plan(plan, MODEL, uncorrected(save=tmp_path / "plain.pt", **options))
    assert all(state.measured_host_bytes == 0 for state in plain.states)
    for size in sizes:
        report = run_plan(
            kept(plan, offload=True), MODEL, uncorrected(bucket_size=size, save=tmp_path / "offloaded.pt", **options)
        )
        assert report.losses == plain.losses
        assert largest_difference(torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "offloaded.pt")) == 0


def wide(batch):
    return [nn.Linear(16, 200), nn.Linear(200, 200), nn.Linear(200, 16)], torch.zeros(batch, 16), nn.functional.mse_loss


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("weights", ["flush", "2bw-uniform", "stash"])
def test_memory_is_what_the_model_says(weights, offload):
    stages = [Stage(0, 2, (0,)), Stage(2, 4, (1,))]
    plan = plan_of(chain_of(wide, 4), stages, weights=weights, optimizer="adam")
    plan = kept(plan, offload=offload, bucket_parameters=5000)
    report = run_plan(plan, ModelSpec("test_offload:wide", "cases.runtime:vectors"), uncorrected(steps=3, lr=0.01))
    for state, stage in zip(report.states, plan.allocation.stages, strict=True):
        count = int(plan.chain.sums.parameters[stage.stop] - plan.chain.sums.parameters[stage.start])
        assert state.measured_bytes == state.planned_bytes
        assert state.measured_host_bytes == state.planned_host_bytes == (8 * count if offload else 0)
        if weights == "flush":
            assert state.measured_bytes == 8 * count + (8 * min(count, 5000) if offload else 8 * count)


def test_a_device_with_several_stages_has_one_bucket():
    """The model counts one for each stage: an upper bound."""
    stages = [Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 4, (0,))]
    plan = plan_of(chain_of(wide, 4), stages, weights="flush", accumulate=2, optimizer="momentum")
    plan = kept(plan, offload=True, bucket_parameters=2000)
    report = run_plan(plan, ModelSpec("test_offload:wide", "cases.runtime:vectors"), uncorrected(steps=3, lr=0.01))
    first, second = report.states
    assert first.measured_bytes <= first.planned_bytes - 4 * 2000
    assert first.measured_host_bytes == first.planned_host_bytes == 4 * (3400 + 3216)
    assert second.measured_bytes == second.planned_bytes == memory_model.weights_bytes(plan.policy, 4 * 40200, 40200, 1)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "cases.faults:Tiring"])
def test_optimizers_that_look_at_whole_weights_are_refused(name):
    plan = plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="flush", accumulate=2)
    if name == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has none")
    kind = name.rpartition(":")[2]
    if name == "Muon":
        with pytest.raises(BadInput):  # it takes matrices alone, which says so by itself
            run_plan(kept(plan, offload=True), MODEL, uncorrected(steps=1, lr=0.1, optimizer=Choice(name)))
        return
    with pytest.raises(BadInput, match=f"{kind} isn't known to step each element by itself, as offloading"):
        run_plan(kept(plan, offload=True), MODEL, uncorrected(steps=1, lr=0.1, optimizer=Choice(name)))
    with pytest.raises(BadInput, match=f"{kind} isn't known .*, as a coarsening of 2 needs; SGD, "):
        run_plan(plan, MODEL, uncorrected(steps=1, lr=0.1, optimizer=Choice(name), coarsening=2))
