import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cases.lowering import chain_of, plan_of

from pipeplan.errors import BadInput
from pipeplan.plan import Schedule, Stage
from pipeplan.problem import Device, Level, Platform, Policy
from pipeplan.runtime.lowering.dry_run import nodes_of, program_lines, slurm_line, torchrun_line
from pipeplan.runtime.lowering.lowered_run import Position, lower_run

TWO = [Stage(0, 1, (0,)), Stage(1, 2, (1,))]


def script_of(**options):
    plan = plan_of(chain_of([(1, 2), (1, 2)]), TWO, Policy("flush", accumulate=1), Schedule("flush", 1))
    return lower_run(plan, 2, **options)


def test_programs_in_short():
    assert program_lines(script_of()) == [
        "rank 0, GPU 0: 0F0v0 0f0>1 0b0<1 0B0v0 0U1 0F1v1 0f1>1 0b1<1 0B1v1 0U2",
        "rank 1, GPU 1: 1f0<0 1F0v0 1B0v0 1b0>0 1U1 1f1<0 1F1v1 1B1v1 1b1>0 1U2",
    ]
    assert program_lines(script_of(), 2)[1] == "rank 1, GPU 1: 1f0<0 1F0v0 ... (10 in all)"


def test_checkpoints_stand_between_updates():
    assert program_lines(script_of(every=1))[0].endswith(" 0B0v0 0U1 S1 0F1v1 0f1>1 0b1<1 0B1v1 0U2 S2")
    later = script_of(every=5, first=Position(1, 7))
    assert program_lines(later)[1] == "rank 1, GPU 1: 1f7<0 1F7v1 1B7v1 1b7>0 1U2 S2"


def test_an_evaluation_is_all_forwards():
    assert program_lines(script_of(evaluates=True, first=Position(1, 7)))[0] == "rank 0, GPU 0: 0F7v1 0f7>1"


def test_one_node_needs_no_rendezvous():
    assert torchrun_line(script_of(), ["run", "my plan.json"]) == (
        "torchrun --standalone --nproc-per-node=2 -m pipeplan run 'my plan.json'"
    )
    assert slurm_line(script_of(), ["run", "p.json"], False) == (
        "srun --nodes=1 --ntasks-per-node=1 torchrun --standalone --nproc-per-node=2 -m pipeplan run p.json"
    )
    assert " --ntasks-per-node=1 --gpus-per-node=2 torchrun " in slurm_line(script_of(), ["run", "p.json"], True)


def on_two_nodes(*memories):
    platform = Platform(tuple(map(Device, memories)), (Level(1, 10), Level(2, 1)))
    plan = plan_of(chain_of([(1, 2), (1, 2)]), TWO, Policy("flush", accumulate=1), Schedule("flush", 1))
    return lower_run(replace(plan, platform=platform), 2)


def test_several_nodes_meet_at_a_port_of_their_own():
    """By hand it follows from the words, under Slurm from the job; nodes that differ are numbered as planned."""
    line = torchrun_line(on_two_nodes(9, 9), ["run", "p.json"])
    port = int(re.fullmatch(
        r"torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:(2\d{4}) --nproc-per-node=1 "
        r"-m pipeplan run p\.json", line)[1])  # fmt: skip
    assert f":{port} " not in torchrun_line(on_two_nodes(9, 9), ["run", "q.json"])
    assert " --node-rank=NODE --master-addr=FIRST_NODE --master-port=2" in torchrun_line(on_two_nodes(9, 8), ["run"])
    said = subprocess.run(
        ["bash", "-c", slurm_line(on_two_nodes(9, 9), ["run", "a b's.json"], True)],
        env={"PATH": f"{Path(__file__).parents[2] / 'cases' / 'slurm'}:/usr/bin:/bin", "SLURM_JOB_ID": "31234",
             "SLURM_JOB_NODELIST": "node[2,10]"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said.splitlines() == [
        "--nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --kill-on-bad-exit=1",
        *(
            f"--nnodes=2 --node-rank={node} --master-addr=node2 --master-port=21234 --nproc-per-node=1 -m pipeplan run "
            "a b's.json|"
            for node in range(2)
        ),
    ]


def test_nodes_are_the_lowest_units_of_the_platform():
    platform = Platform((Device(1),) * 8, (Level(4, 10), Level(2, 1)))
    assert nodes_of(platform, range(8)) == (2, 4)
    assert nodes_of(platform, [0, 1, 4, 5]) == (2, 2)
    assert nodes_of(platform, [4, 5]) == (1, 2)
    assert nodes_of(Platform.flat(8, 1), range(8)) == (1, 8)
    with pytest.raises(BadInput, match="uses 4, 1 devices of the platform's nodes"):
        nodes_of(platform, range(5))
