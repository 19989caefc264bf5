"""Mixed precision: runs equal training in one process by the same rules, and an overflow skips an update everywhere."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.half import exploding, exploding_vectors, halved_serial
from cases.runtime import chain_of, largest_difference, plan_of, uncorrected
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan import zoo
from pipeplan.errors import BadInput, RunFailed
from pipeplan.plan import Stage
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.half import AS_PROFILED, HalfOptions, first_scale, half_type
from pipeplan.runtime.training.update.factors import LossScale, overflow
from pipeplan.runtime.training.update.optimizers import parse_choice, schedule_maker
from pipeplan.schedule.timeline import lane_use

SCHEDULER = parse_choice("StepLR,step_size=2,gamma=0.5", "here")
EXPLODING = ModelSpec("cases.half:exploding", "cases.half:exploding_vectors")


def mixed(build, stages, *, dtype=torch.bfloat16, data=None, offload=False, bucket=10**6, **policy):
    plan = plan_of(chain_of(build, 4, dtype=dtype, data=data), stages, **policy)
    return replace(plan, policy=replace(plan.policy, precision="mixed", offload=offload, bucket_parameters=bucket))


def test_the_scale_is_halved_on_overflow_and_doubled_after_so_many_good_updates():
    scale = LossScale(8.0, 3)
    seen = []
    for overflows in (False, False, True, False, False, False, False, True, True):
        scale = scale.after(overflows)
        seen.append((scale.scale, scale.good))
    assert seen == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1), (4, 0), (2, 0)]
    assert LossScale(8.0, 0).after(False).after(False).scale == 8
    with pytest.raises(RunFailed, match=r"overflows at a loss scale of 1.52588e-05 still"):
        LossScale(2.0**-16).after(True)


class Counted(TorchDispatchMode):
    """How many operations there are."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_looking_for_an_overflow_takes_a_gpu_no_longer_for_many_weights():
    gradients = [torch.ones(3, 2, dtype=dtype) for dtype in (torch.float16, torch.float32) for _ in range(100)]
    with Counted() as counted:
        assert not overflow(gradients, 2)
    assert counted.count < 20


def test_what_might_overflow_in_the_sum_counts_as_overflow():
    most = torch.finfo(torch.float16).max
    half = torch.tensor([1.0, -most / 2], dtype=torch.float16)
    assert not overflow([None, torch.zeros(0), half], 2)
    assert overflow([half], 3)
    assert overflow([half, torch.tensor([float("nan")])], 1)
    assert overflow([half.new_full((2, 3), float("nan")), half], 1)
    assert overflow([None, torch.zeros(0)], 1) is None
    assert overflow([torch.tensor([float("-inf")], dtype=torch.bfloat16)], 1)


@pytest.mark.parametrize(
    ("stages", "accumulate", "offload", "bucket"),
    [
        ([(0, 2, (0,)), (2, 6, (1,))], 3, False, 10**6),
        ([(0, 2, (0,)), (2, 4, (1,)), (4, 6, (0,))], 2, True, 100),
        ([(0, 2, (0, 1, 2)), (2, 6, (3,))], 6, True, 100),
    ],
)
def test_overflow_skips_an_update_on_all_ranks_and_changes_nothing_else(stages, accumulate, offload, bucket, tmp_path):
    """Microbatches 4 and 13 overflow in the first layer alone, on one of its replicas; later layers' are finite."""
    plan = mixed(
        exploding, stages, offload=offload, bucket=bucket, weights="flush", accumulate=accumulate,
        optimizer="adam",
    )  # fmt: skip
    steps = 18 // accumulate
    options = {"steps": steps, "lr": 0.02}
    report = run_plan(
        plan,
        EXPLODING,
        uncorrected(
            scheduler=SCHEDULER,
            half=HalfOptions(loss_scale=2.0**10, window=2),
            save=tmp_path / "s",
            coarsening=1 if len(stages[0][2]) > 1 else None,
            **options,
        ),
    )
    replicas = len(stages[0][2])
    losses, state, skipped, scale = halved_serial(
        exploding, exploding_vectors, 4, dtype=torch.bfloat16, accumulate=accumulate,
        optimizer="adam", scale=2.0**10, window=2, replicas=replicas, cut=2, scheduler=schedule_maker(SCHEDULER),
        **options,
    )  # fmt: skip
    assert skipped == (4 // accumulate + 1, 13 // accumulate + 1)
    assert report.skipped == skipped
    assert report.loss_scale == scale
    assert report.losses == tuple(losses)
    assert largest_difference(torch.load(tmp_path / "s"), state) == 0


GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16"


def zoo_gpt(batch):
    return zoo.load(GPT)(batch, seed=0)


@pytest.mark.parametrize(
    ("dtype", "scale", "checkpoint"), [(torch.bfloat16, 1.0, ()), (torch.float16, 2.0**16, ((1, 3),))]
)
def test_a_transformer_trains_as_in_one_process(dtype, scale, checkpoint, tmp_path):
    model = zoo.load(GPT)
    stages = [Stage(0, 3, (0,), checkpoint), Stage(3, 6, (1,))]
    offload = bool(checkpoint)
    plan = mixed(
        model, stages, dtype=dtype, data=model.data(4), offload=offload, bucket=2000, weights="flush", accumulate=2,
        optimizer="adam",
    )  # fmt: skip
    options = {"steps": 5, "lr": 0.002}
    report = run_plan(plan, ModelSpec(GPT), uncorrected(save=tmp_path / "s", **options))
    losses, state, skipped, last = halved_serial(
        zoo_gpt, model.data(4), 4, dtype=dtype, accumulate=2, optimizer="adam", scale=scale, window=2000, **options
    )
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert largest_difference(torch.load(tmp_path / "s"), state) <= 1e-6
    assert (report.skipped, report.loss_scale) == (skipped, last)
    assert losses[-1] < losses[0]
    timeline = lower_run(plan, 1).timeline
    for device, kept in zip(report.activations, report.states, strict=True):
        lane = next(i for i, lane in enumerate(timeline.program.lanes) if lane.device == device.device)
        measured = device.measured_bytes + kept.measured_bytes + lane_use(timeline, lane).buffer_bytes
        assert measured == lane_use(timeline, lane).peak_bytes


@pytest.mark.parametrize("offload", [False, True])
def test_memory_is_what_the_model_says(offload):
    """20 bytes for each parameter, with offloading 4, and 16 for those of a bucket; 12 in host memory."""
    stages = [Stage(0, 2, (0,)), Stage(2, 6, (1,))]
    plan = mixed(exploding, stages, offload=offload, bucket=100, weights="flush", accumulate=2, optimizer="adam")
    report = run_plan(plan, EXPLODING, uncorrected(steps=2, lr=0.02))
    for state, count in zip(report.states, (544, 544), strict=True):
        assert state.measured_bytes == state.planned_bytes == (4 * count + 1600 if offload else 20 * count)
        assert state.measured_host_bytes == state.planned_host_bytes == (12 * count if offload else 0)


def test_asynchronous_weights_run_with_a_fixed_scale_and_end_with_an_overflow(tmp_path):
    stages = [(0, 2, (0,)), (2, 6, (1,))]
    model = ModelSpec("cases.half:exploding", "cases.runtime:vectors")
    for weights in ("2bw", "latest", "stash"):
        plan = mixed(exploding, stages, weights=weights, optimizer="momentum")
        plain = run_plan(plan, model, uncorrected(steps=6, lr=0.02, save=tmp_path / "plain"))
        scaled = run_plan(
            mixed(exploding, stages, weights=weights, optimizer="momentum", offload=True, bucket=50),
            model,
            uncorrected(steps=6, lr=0.02, half=HalfOptions(loss_scale=2.0**12), save=tmp_path / "scaled"),
        )
        assert scaled.losses == plain.losses  # a power of two, so no bit changes
        assert largest_difference(torch.load(tmp_path / "plain"), torch.load(tmp_path / "scaled")) == 0
        assert plain.stages[0].versions == (1 if weights == "latest" else 2)
    with pytest.raises(RunFailed, match=r"the gradient of update \d overflows .* only weights that drain"):
        run_plan(plan, EXPLODING, uncorrected(steps=6, lr=0.02))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Bit for bit, with offloading, on another bucket size too: masters, state, loss scale and its count."""
    stages = [(0, 3, (0, 1)), (3, 6, (2,))]
    plan = mixed(exploding, stages, offload=True, bucket=100, weights="flush", accumulate=2, optimizer="adam")
    options = {"lr": 0.02, "scheduler": SCHEDULER, "half": HalfOptions(loss_scale=2.0**8, window=3)}
    whole = run_plan(plan, EXPLODING, uncorrected(steps=8, save=tmp_path / "one", checkpoint=tmp_path / "a", **options))
    first = run_plan(plan, EXPLODING, uncorrected(steps=5, checkpoint=tmp_path / "b", **options))
    rest = run_plan(
        plan,
        EXPLODING,
        uncorrected(steps=8, checkpoint=tmp_path / "b", resume=True, save=tmp_path / "two", bucket_size=77, **options),
    )
    assert first.losses + rest.losses == whole.losses
    assert first.skipped + rest.skipped == whole.skipped == (3, 7)
    assert rest.loss_scale == whole.loss_scale
    assert largest_difference(torch.load(tmp_path / "one"), torch.load(tmp_path / "two")) == 0


def test_a_checkpoint_is_taken_up_in_the_other_precision_and_on_another_plan(tmp_path):
    """Weights and state are written in full precision; batch statistics have the model's."""
    build = runtime_cases.dropping
    model = ModelSpec("cases.runtime:dropping", "cases.runtime:vectors")
    full = plan_of(chain_of(build, 4), [(0, 5, (0,))], weights="flush", accumulate=2, optimizer="adam")
    half = mixed(build, [(0, 2, (0,)), (2, 5, (1,))], offload=True, weights="flush", accumulate=2, optimizer="adam")
    states = []
    for turn, plan in enumerate((full, half, full)):
        run_plan(
            plan,
            model,
            uncorrected(steps=2 * (turn + 1), lr=0.02, checkpoint=tmp_path / "c", resume=True, save=tmp_path / "s"),
        )
        states.append(torch.load(tmp_path / "s"))
        run_plan(
            plan if turn else half,
            model,
            uncorrected(steps=1, lr=0.02, checkpoint=tmp_path / "c", resume=True, evaluates=True, save=tmp_path / "e"),
        )
        evaluated = torch.load(tmp_path / "e")
        trained = [key for key in states[0] if key.endswith("weight")]
        assert len(trained) == 4
        assert all(torch.equal(evaluated[key], states[-1][key]) for key in trained)
        assert largest_difference(evaluated, states[-1]) <= 2**-8
    assert all(state[key].dtype == torch.float32 for state in states for key in trained)
    assert largest_difference(states[0], states[2]) > 0


def test_any_coarsening_gives_the_same_bits_and_overlaps_sums_with_steps(tmp_path):
    stages = [(0, 5, (0, 1, 2)), (5, 6, (3,))]
    model = ModelSpec("cases.half:exploding", "cases.runtime:vectors")
    states = {}
    for k in (1, 2, 0):
        plan = mixed(exploding, stages, bucket=150, weights="flush", accumulate=6, optimizer="adam")
        by_plan = replace(plan, policy=replace(plan.policy, coarsening=k or None))
        options = {"coarsening": 0} if k == 0 else {}
        report = run_plan(by_plan, model, uncorrected(steps=3, lr=0.02, save=tmp_path / "s", **options))
        states[k] = torch.load(tmp_path / "s")
        for times in report.times[:3]:
            sums = [t for t in times if t.activity == "REDUCE" and t.microbatch == 2]
            steps = [t for t in times if t.activity == "UPDATE" and t.microbatch == 2]
            assert len(sums) == len(steps) == {1: 8, 2: 4, 0: 1}[k]  # 1088 parameters
            for following, step in zip(sums[1:], steps, strict=False):
                assert following.start_ns < step.start_ns
    assert largest_difference(states[1], states[2]) == largest_difference(states[1], states[0]) == 0


def test_coarsening_changes_no_bit_in_full_precision(tmp_path):
    plan = plan_of(chain_of(exploding, 4), [(0, 4, (0, 1)), (4, 6, (2,))], weights="2bw", optimizer="momentum")
    model = ModelSpec("cases.half:exploding", "cases.runtime:vectors")
    states = []
    for k, size in ((0, None), (1, 300), (3, 77)):
        run_plan(plan, model, uncorrected(steps=4, lr=0.02, coarsening=k, bucket_size=size, save=tmp_path / "s"))
        states.append(torch.load(tmp_path / "s"))
    assert largest_difference(states[0], states[1]) == largest_difference(states[0], states[2]) == 0


def test_what_does_not_go_together_is_refused():
    stages = [(0, 2, (0,)), (2, 6, (1,))]
    full = plan_of(chain_of(exploding, 4), stages, weights="flush", accumulate=2)
    with pytest.raises(BadInput, match="its precision is fp32; --half and --loss-scale are for mixed"):
        half_type(full, HalfOptions("bf16"))
    assert half_type(full, AS_PROFILED) is None
    delayed = mixed(exploding, stages, weights="2bw")
    assert half_type(delayed, AS_PROFILED) == torch.bfloat16
    assert first_scale(delayed, torch.bfloat16, AS_PROFILED) == LossScale(1.0, 0)
    with pytest.raises(BadInput, match=r"--weights 2bw cannot skip an update .* fp16 .*; bf16 can be run"):
        half_type(delayed, HalfOptions("fp16"))
    drained = mixed(exploding, stages, weights="flush", accumulate=2)
    assert first_scale(drained, half_type(drained, HalfOptions("fp16")), AS_PROFILED) == LossScale(2.0**16, 2000)
