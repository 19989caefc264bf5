"""Plans whose backwards come in two parts, and orders that are written in files, on real processes."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import largest_difference, plan_of, serial, simulated_version, uncorrected, zoo_chain

from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.runtime.engine.asked import PIPEDREAM, run_otherwise
from pipeplan.runtime.engine.phases import of_schedule
from pipeplan.runtime.lowering.dry_run import program_lines
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16,tied=true"
VEE = [Stage(0, 2, (0,), ((0, 2),)), Stage(2, 3, (1,)), Stage(3, 4, (1,)), Stage(4, 6, (0,))]
ORDER = (
    "0F0,0F1,3F0,0R0,3I0,3W0,0I0,0F2,3F1,0R1,0W0,3I1,0I1,3W1,3F2,0R2,3I2,0I2,0W1,3W2,0W2\n"
    "1F0,2F0,1F1,2F1,2I0,1I0,2W0,1F2,2I1,1W0,2F2,1I1,2I2,1I2,1W1,2W1,1W2,2W2\n"
)


@pytest.fixture(scope="module")
def chain():
    return zoo_chain(GPT, 2, split=True)


def test_an_order_in_a_file_with_split_backwards_trains_as_one_process_does(chain, tmp_path):
    """Stages placed like a V, one recomputed, weights tied between two of a device: equal to the last bit."""
    path = tmp_path / "order.csv"
    path.write_text(ORDER)
    plan = run_otherwise(plan_of(chain, VEE, accumulate=3, optimizer="momentum"), False, str(path), None)
    words = program_lines(lower_run(plan, 1))[0].removeprefix("rank 0, GPU 0: ").split()
    assert ",".join(x.removesuffix("v0") for x in words if x.endswith("v0")) == ORDER.split()[0]
    options = {"steps": 3, "lr": 0.05, "seed": 2}
    report = run_plan(plan, ModelSpec(GPT), uncorrected(save=tmp_path / "s", **options))
    losses, state = serial(GPT, 2, accumulate=3, optimizer="momentum", **options)
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert largest_difference(torch.load(tmp_path / "s"), state) <= 1e-6
    recomputing, storing = report.activations
    assert storing.measured_bytes == storing.planned_bytes
    assert recomputing.measured_bytes <= recomputing.planned_bytes
    assert report.calibrated_period_ns is not None
    assert all(stage.backward_ns for stage in report.stages)


def test_pipedreams_own_schedule_trains_as_its_weight_versions_say(tmp_path):
    """1F1B at NOAM depth with stashing: as one process that takes the versions which the simulation tells."""
    name = GPT.removesuffix(",tied=true")
    plan = plan_of(
        zoo_chain(name, 2), [(0, 2, (0,)), (2, 4, (1,)), (4, 6, (2,))], weights="stash", optimizer="momentum"
    )
    plan = run_otherwise(plan, False, PIPEDREAM, None)
    options = {"steps": 12, "lr": 0.05, "seed": 2}
    report = run_plan(plan, ModelSpec(name), uncorrected(save=tmp_path / "s", **options))
    version = simulated_version(plan, 12)
    assert [version(s, 11) for s in range(3)] == [9, 10, 11]  # stage s of n is n - s - 1 updates behind
    assert [x.versions for x in report.stages] == [3, 2, 1]
    losses, state = serial(name, 2, accumulate=1, optimizer="momentum", version=version, cuts=(2, 4), **options)
    assert report.losses == tuple(losses)
    assert largest_difference(torch.load(tmp_path / "s"), state) == 0


def test_a_run_says_that_shared_operations_follow_each_other(chain):
    plan = run_otherwise(plan_of(chain, VEE, accumulate=3), False, "dualpipev", None)
    (said,) = of_schedule(lower_run(plan, 1))
    assert said.startswith("dualpipev: forwards and backwards that share an operation ran one after the other")
    assert not list(of_schedule(lower_run(run_otherwise(plan, False, "zbv", None), 1)))


def test_what_a_plan_cannot_run_under_is_said(chain, tmp_path):
    plan = plan_of(chain, VEE, accumulate=3)
    path = tmp_path / "order.csv"
    path.write_text("0F0,1F0,1B0,0B0\n")
    for schedule, said in (
        ("zbw", "--schedule: 'zbw' is not one of flush, "),
        (
            "zb1p",
            "zb1p: zb1p gives each GPU one stage; device 0 has .* `pipeplan plan --weights flush --schedule zb1p`",
        ),
        (str(path), "order.csv: the order's stages are on ranks \\[0, 0\\], those of the plan on \\[0, 1, 1, 0\\]"),
        ("nf1b", "plan: nf1b takes the newest weights, which is for weights latest"),
    ):
        with pytest.raises(BadInput, match=said):
            run_otherwise(plan, False, schedule, None)
    without = replace(run_otherwise(plan, False, "gpipe", None), pattern=None)
    with pytest.raises(BadInput, match="plan: has no pattern, in whose order flush runs"):
        run_otherwise(without, False, "flush", None)
