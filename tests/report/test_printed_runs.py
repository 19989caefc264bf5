"""What do runs ask for and tell, and what is printed of them? Beside what is kept in ``printed/``."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import pytest
from cases.fuzz.judge import called
from cases.plans import straight
from cases.printed import check_printed, entries, without_ends

from pipeplan.errors import BadInput, RunStopped
from pipeplan.plan import Plan, Schedule
from pipeplan.problem import Policy

pytest.importorskip("torch")
from cases.measured import replayed, script_of

from pipeplan.report.tables.run import KEPT_OFF, print_report, progress_printer
from pipeplan.report.traces import measured_trace
from pipeplan.runtime.measure.progress import StepProgress
from pipeplan.runtime.measure.report import DeviceMemory, DeviceState, ReadingTime, TransferTime, make_report

M = "--model cases.runtime:dropping --data cases.runtime:vectors"
PLAYED = f"""
run run.json
run named.json
run zoo.json --steps 2 --device cpu
run run.json {M} --steps 3 --trace t.json
run run.json {M} --steps 3 --json
run run.json {M} --trace -
run run.json {M} --trace - --json
run run.json {M} --evaluate --clip-norm 2
run run.json {M} --bracket
run run.json {M} --bracket --json --threads 2
run run.json {M} --bracket --threads 3
run run.json {M} --debug --trace nowhere/t.json
run run.json {M} --against flush --save s.pt --checkpoint c --checkpoint-every 2 --keep-checkpoints 3 --trace t.json
run run.json {M} --against run.json --vertical-sync --json
run run.json {M} --against run.json --resume
run run.json {M} --against run.json --trace -
run run.json {M} --against parallel.json
run zb.json {M} --against flush --clip-norm 1 --device cpu
run tight.json {M} --against flush --device cpu
run run.json {M} --callback builtins:print
run run.json {M} --link-delay 1ms
run run.json {M} --optimizer AdamW,weight_decay=0.1 --scheduler StepLR,step_size=2 --warmup 2 --no-decay a,b --lr 0
run run.json {M} --groups a:b --threads 2 --seed 5 --timeout 61s --link-delay 1ms --load l.pt --max-restarts 2
run run.json {M} --half bf16 --loss-scale 8 --loss-scale-window 3 --bucket-size 9 --coarsening all --no-compare
run run.json {M} --ema 0.9 --averaged --delay-correction sc --device cpu
run run.json {M} --epochs 2 --epoch-length 5 --eval-data a:b --eval-batches 3 --monitor max:x --patience 2 --metrics c:d
run run.json {M} --eval-data a:b --eval-every 4 --eval-batches 3 --steps 9
run run.json {M} --eval-data a:b --eval-batches 3
run run.json {M} --tensor-plan e:f
run run.json --tensor-plan e:f
run run.json --model a:b
run run.json {M} --limit 2
run zb.json {M} --schedule best --device cpu
run zb.json {M} --schedule message-driven --limit 2 --device cpu
run driven.json {M} --limit 2 --device cpu
run run.json {M} --no-decay a,,b
run run.json {M} --log-dir x --steps 7
run zb.json --dry-run --steps 1 --device cpu --checkpoint c --checkpoint-every 1
run zb.json --dry-run --steps 1 --evaluate --device cuda
run parallel.json --dry-run --steps 1
""".split("\n")[1:-1]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def runs() -> dict[str, str]:
    """Return what is printed of made-up runs, in which operations took three times as long as planned."""
    script = script_of(Policy("2bw", 2), Schedule(), 12, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
    other = script_of(Policy("flush", 2), Schedule("flush", 2), 12, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
    plain, beside = (make_report(x, replayed(x, 3)) for x in (script, other))
    lower = replace(beside, losses=[x / 2 for x in beside.losses])
    stages = tuple(replace(x, data_ns=10**5, data_wait_ns=10**6, sum_ns=10**6, sum_wait_ns=10**5) for x in plain.stages)
    full = replace(
        plain,
        stages=stages,
        activations=tuple(replace(x, measured_host_bytes=2 * 10**6) for x in plain.activations),
        bracket=(1.0, 1.2),
        kept_off=0.3,
        exchange="nccl",
        sums="nccl",
        forgotten=7,
        memory=(DeviceMemory(0, 0, 10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9, 2),),
        states=(DeviceState(0, 0, 10**6, 2 * 10**6, 10**6, 10**6),),
        reading=(ReadingTime(0, 0, 2, 10**6), ReadingTime(1, 1, 1, 10**6)),
        gradient_norms=(None, 1.0, 2.0),
        loss_scale=1024.0,
        skipped=(3,),
        evaluations={2: {"loss": 1.0}},
        best_step=2,
        ended_early=True,
    )
    away = replace(script.plan, chain=replace(script.plan.chain, device="a GPU"))
    sent = (TransferTime("F", 0, 1, 7 * 10**5, 2 * 10**5), TransferTime("B", 1, 1, 9 * 10**5, 2 * 10**5))
    abroad = replace(plain, transfers=sent, hardware=("b", "a"), forgotten=3, kept_off=KEPT_OFF)
    small = script_of(Policy("2bw", 2), Schedule(), 1, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
    short = make_report(small, replayed(small, 2))
    driven = replace(script.plan, schedule=Schedule("message-driven", 2, 2), pattern=None)
    texts = {}
    for name, words in {
        "run-away": (away, abroad, False, False),
        "run-short": (script.plan, short, False, False),
        "run-driven": (driven, plain, False, False),
        "run": (script.plan, plain, False, False),
        "run-full": (script.plan, full, False, False, (other.plan, beside)),
        "run-json": (script.plan, plain, False, True),
        "run-evaluate-json": (script.plan, plain, True, True, (other.plan, lower)),
        "run-evaluate": (script.plan, plain, True, False),
    }.items():
        with redirect_stdout(io.StringIO()) as told:
            print_report(*words)
        texts[name] = entries(told.getvalue()) if name.endswith("json") else told.getvalue()
    return {name: without_ends(text) for name, text in texts.items()}


def test_progress_is_told_of_the_ends_of_slow_updates_and_of_each_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell = progress_printer(straight(), False, True)
    for step in range(1, 5):
        tell(StepProgress(step, 4, 1 / step, 10**9 if step == 3 else 10**6, 8.0, None if step < 4 else 2.0))
    tell(StepProgress(4, 4, 0.25, None, None, None, evaluation={"loss": 0.5, "accuracy": 0.75}, best=True))
    assert capsys.readouterr().err.splitlines() == [
        "update 1 of 4: loss 1.0000, 1.000 ms per microbatch",
        "update 3 of 4: loss 0.3333, 1000.000 ms per microbatch",
        "update 4 of 4: loss 0.2500, gradient norm 2, 1.000 ms per microbatch",
        "update 4 of 4: on held-out data loss 0.5000, accuracy 0.7500, the best so far",
    ]


def played(folder: Path) -> str:
    """Return what runs are asked for and tell, by ``run_plan`` that only tells of two updates; lines none before has.

    Then what the ranks of torchrun tell each other, and what is left of a run that is stopped.
    """
    script = script_of(Policy("2bw", 2), Schedule(), 12, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
    report = replace(
        make_report(script, replayed(script, 3)), seconds=0.0, notes=("it was so",), compared="as compared"
    )
    told, ends = list[str](), list[Any]()

    def play(plan: Plan, spec: Any, options: Any, hear: Any, note: Any, status: Any) -> Any:
        given = {x.name: y for x in fields(options) if (y := getattr(options, x.name)) != x.default}
        policy, schedule = plan.policy, (plan.schedule.kind, plan.schedule.limit)
        about = policy.weights, policy.vertical_sync, policy.clip, plan.interval, *schedule
        told.extend((f"> {about}", f"> {spec.build} {spec.data}", f"> {given}", f"> {status is None}"))
        for step, more in ((1, {}), (2, {}), (2, {"evaluation": {"loss": 0.5}, "best": True})):
            if hear is not None:
                hear(StepProgress(step, 2, 1 / step, 10**6, 8.0, 2.0, **more))
        note("as noted")
        if ends:
            raise ends[0]
        return report if os.environ.get("RANK", "0") == "0" else None

    def line(words: str) -> list[str]:
        told.clear()
        shares = iter((1.1, BadInput("too busy") if "--threads 3" in words else 1.2))

        def now(plan: Plan, spec: Any, threads: int, **more: Any) -> float:
            told.append(f"> profiled on {threads}, {sorted(more)}")
            if isinstance(share := next(shares), Exception):
                raise share
            return float(share) * (1 if threads == 1 else 9)

        with patch("pipeplan.cli.run.period_now", now):
            done = called(words.split(), folder)
        out = done.out
        if out.startswith("{"):
            figures = json.loads(out)
            kept = {key: x for key, x in figures.items() if key in ("bracket", "beside", "steps", "notes")}
            out = entries(json.dumps(kept) + "\n") if kept else entries(out)
        texts = [out, done.err, *told, str(done.code)]
        if (trace := folder / "t.json").exists():
            texts.append(f"traced {trace.stat().st_size > 5000}")
            trace.unlink()
        found = [x.rstrip().replace(str(folder), "HERE") for text in texts for x in text.splitlines()]
        left_out = ("Usage: ", "Try ", *(["  "] if "--debug" in words else []))
        found = [re.sub(r"the zoo has .*", "the zoo has others", x) for x in found if not x.startswith(left_out)]
        fresh = [x for x in found if x not in seen]
        seen.update(fresh)
        return [f"$ {words.replace(M, 'M')}: {len(found)} lines", *fresh]

    class Writer:
        def __init__(self, folder: str) -> None:
            told.append(f"> {Path(folder).name}")

        def add_scalar(self, *scalar: Any) -> None:
            told.append(f"> {scalar}")

        def close(self) -> None:
            told.append("> closed")

    def tell(error: Exception, watch: Any) -> None:
        told.append(f"> told {type(error).__name__} {error} {watch.tell_signal}")

    seen, lines, ranks = set[str](), list[str](), f"run run.json {M} --steps 3"
    with (
        patch("pipeplan.runtime.processes.launch.run_plan", play),
        patch("pipeplan.runtime.processes.launch.tell_others", tell),
        patch("pipeplan.runtime.surroundings.untried", lambda version: f"untried {version.count('.')}"),
        patch("pipeplan.cli.showing.QUIET_S", math.inf),
        patch("pipeplan.runtime.device.sharing", lambda *words: f"shared {words}"),
        patch("pipeplan.cli.run.status", lambda: SimpleNamespace(say=lambda words: told.append(f"> says {words!r}"))),
        patch.dict(sys.modules, {"torch.utils.tensorboard": SimpleNamespace(SummaryWriter=Writer)}),
    ):
        for words in PLAYED:
            lines += line(words)
        with patch("pipeplan.planner.least_late.drained_quickly", lambda *_: None):
            lines += line(f"run run.json {M} --against flush")
        ends.append(RunStopped("it was stopped", 143))
        lines += line(f"{ranks} --trace t.json")
        ends[0] = RunStopped("it was stopped", report=report)
        lines += line(f"{ranks} --trace t.json") + line(ranks)
        for number, more in ((1, {"LOCAL_RANK": "1"}), (0, {"LOCAL_RANK": "0"})):
            with patch.dict(os.environ, TORCHRUN | more | {"RANK": str(number)}):
                lines += line(ranks)
                for end in (click.exceptions.Exit(3), ValueError("it is odd"), BadInput("bad")):
                    ends[:] = [end]
                    lines += line(ranks)
                ends.clear()
                lines += line(ranks) + line(f"{ranks} --bracket") + line(f"{ranks} --x") + line(f"{ranks} --json")
        with patch.dict(os.environ, {"RANK": "1"}):
            lines += line(f"{ranks} --x") + line(ranks) + line(f"{ranks} --against run.json")
    return "\n".join(lines) + "\n"


def test_what_runs_are_asked_for_is_what_is_kept(command_files: Path) -> None:
    check_printed(played(command_files), "played")


@pytest.mark.parametrize("weights", ["latest", "2bw", "flush"])
def test_the_trace_of_a_run_is_what_is_kept(weights: str) -> None:
    schedule = {"latest": Schedule("nf1b", 4, 2), "2bw": Schedule(), "flush": Schedule("flush", 4)}[weights]
    script = script_of(Policy(weights, 4), schedule, 2, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
    check_printed(entries(measured_trace(script.plan, make_report(script, replayed(script, 3)))), f"trace-{weights}")


RUNS = ("run", "run-full", "run-json", "run-evaluate-json", "run-evaluate", "run-away", "run-short", "run-driven")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_s_report_is_what_is_kept(name: str) -> None:
    check_printed(runs()[name], name)
