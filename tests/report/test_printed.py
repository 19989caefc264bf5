"""Do commands print what they printed? Each on the same small files, beside what is kept in ``printed/``.

``python tests/report/test_printed.py`` keeps what they print now: read the difference before it is committed.
"""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from cases.fuzz.judge import called
from cases.mutations import CHAIN

from pipeplan.files.profiles import profile_text

CHANGES = (("flush", 8, 11 * 10**6), ("2bw", 4, 12 * 10**6), ("stash", 4, None), ("latest", 8, 9 * 10**6))
KEPT = Path(__file__).parent / "printed"
ON = "--gpus 2 --mem 1GB --bandwidth 1GB/s"
STAGES = "--split 3,2 --on 0/1"
EXPORTED, ESTIMATED = "export loop.json --to torch-csv", "profile zoo:gpt-tiny,blocks=2 --microbatch 2 --estimate a100"
STUCK = """0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1
"""
GPIPE = "export zb.json --to torch-csv --schedule gpipe"
IMPORTED = "import gpt.json train.sh --from megatron --gpus 4 --mem 1GB --effort quick"
BILL = "--samples 1e6 --price 2.5"
MADE = {  # files of their own, each by a command
    "plan.json": f"plan a.json {ON} {STAGES} --weights 2bw --optimizer adam",
    "zb.json": f"plan a.json {ON} {STAGES} --weights flush --schedule zb1p --accumulate 4",
    "loop.json": f"plan a.json {ON} --split 1,1,1,2 --on 0/1/0/1 --weights flush --schedule interleaved --accumulate 4",
    "driven.json": f"plan a.json {ON} {STAGES} --schedule message-driven --accumulate 4 --limit 3",
    "shifts.json": f"plan a.json {ON} --split 1,1,3 --on 0/1/0 --weights stash",
    "parallel.json": f"plan a.json {ON} --split 5 --on 0-1 --weights stash",
    "tight.json": "plan a.json --gpus 2 --mem 14MB --bandwidth 1GB/s --split 3,2 --on 0/1 --weights 2bw",
    "replicas.json": "plan a.json --platform servers.json --split 2,3 --on 0-1/2-3 --weights stash",
    "small.json": f"plan a.json --gpus 2 --mem 12MB --bandwidth 1GB/s {STAGES} --weights flush --schedule 1f1b",
    "again.json": f"plan a.json {ON} --split 2,3 --on 0/1 --recompute all --weights flush --schedule 1f1b",
    "segments.json": f"plan a.json {ON} --split 2,3 --on 0/1 --recompute all --weights latest --optimizer momentum",
}
MADE_LATER = {"zoo.json": f"plan estimate.json {ON} --weights flush --schedule 1f1b --accumulate 2"}
REFUSED = """
plan
plna a.json
plan a.json --gpus 2 --mem 1GB -O speed
plan a.json --gpus 2 --mem 1GB -O solver=none
plan a.json --gpus x --mem 1GB
plan a.json --gpus 0 --mem 1GB
plan a.json --gpus 2 --mem 5
plan a.json --gpus 2 --mem 1GB --samples 5 --tokens 5/1
plan a.json --gpus 2 --mem 1GB --samples 1.5
plan a.json --gpus 2 --mem 1GB --samples 0
plan a.json --gpus 2 --mem 1GB --samples 1e19
plan a.json --gpus 2 --mem 1GB --tokens 5
plan a.json --gpus 2 --mem 1GB --price 5
plan a.json --gpus 2 --mem 1GB --samples 5 --price x
plan a.json --gpus 2 --mem 1GB -o none/plan.json
plan none.json --gpus 2 --mem 1GB
compare a.json --gpus 2 --mem 1GB --csv - --json
compare a.json --gpus 4-2 --mem 1GB
check
check plan.json --semantics lazy
check train.sh
simulate plan.json --text --json
simulate plan.json --schedule all --text
simulate plan.json --schedule 1f1b --schedule gpipe --trace t.json
simulate plan.json --seed 3
simulate plan.json --trace - --json
simulate plan.json --jitter 5
simulate plan.json --jitter 500%
simulate plan.json --jitter x%
simulate plan.json --jitter 100.5%
simulate plan.json --jitter -1%
simulate plan.json --width 39
simulate plan.json --width 10001
simulate plan.json --microbatches 0
simulate plan.json --microbatches 1000001
simulate plan.json --jitter 5% --seed -1
run zb.json --dry-run --lr -1
run zb.json --dry-run --lr nan
run zb.json --dry-run --lr inf
run zb.json --dry-run --clip-norm 0
run zb.json --dry-run --limit 0
run zb.json --dry-run --coarsening 0
run zb.json --dry-run --link-delay 1
plan a.json --gpus 4097 --mem 1GB
plan a.json --gpus 2x3x4 --mem 1GB
plan a.json --gpus 2 --mem 1GB --zero 4
plan a.json --gpus 2 --mem 1GB -O effort=9
simulate plan.json --schedule nf1b --microbatches 7
simulate driven.json --schedule pattern
export segments.json --to torch-csv
plan a.json --gpus 2 --mem 1GB --weights stash --schedule nf1b
plan a.json --gpus 2 --mem 1GB --limit 3
plan a.json --gpus 2 --mem 1GB --vertical-sync
synthesize plan.json --gpus 2
synthesize --gpus 2 --times 1,2,3 --microbatches 2 --chunks 2
synthesize --gpus 2 --times 1,2 --microbatches 2
synthesize --gpus 2 --times 1,2,3 --microbatches 2 --limit 1
simulate plan.json --schedule nothing
import gpt.json train.sh --from megatron --gpus 4 --mem 1GB -o x.json --best x.json
import gpt.json train.sh --from megatron --gpus 4 --mem 1GB -o - --json
import gpt.json train.sh --from torchtitan --gpus 4 --mem 1GB
diff a.json b.json --recalibrated c.json
diff run.json trace.json --recalibrated - --json
diff plan.json trace.json
run zb.json --dry-run --steps 1 --epochs 2
run zb.json --dry-run --epoch-length 5
run zb.json --dry-run --eval-every 3
run zb.json --bracket --evaluate
run zb.json --against flush --resume
run zb.json --against plan.json
run zb.json --log-dir x --evaluate
run zb.json --dry-run --limit 3
run zb.json --dry-run --timeout 0s
run zb.json --dry-run --metrics loss,,x
export plan.json --to torch-csv --schedule nothing
export plan.json --to nothing
export zb.json --to torchtitan --schedule 1f1b --rename block
export zb.json --to torchtitan --schedule 1f1b --rename (=b
profile zoo:gpt-tiny --microbatch 2 --estimate a100 --tensor-plan a:b -o x.json
show plan.json -o x.txt
show plan.json --width 0
synthesize
synthesize --gpus 2 --times 1,2
synthesize --gpus 2 --times x
synthesize --gpus 2 --times 1,2,3 --microbatches 2 -o - --json
report none.json -o page.html
calibrate a.json --gpu a100 --measured none.csv
calibrate a.json --gpu a100
list nothing
schema nothing
"""
M = "--model cases.runtime:dropping --data cases.runtime:vectors"
PLAYED = f"""
run run.json
run named.json
run zoo.json --steps 2 --device cpu
run run.json {M} --steps 3 --trace t.json
run run.json {M} --steps 3 --json
run run.json {M} --trace -
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
COMMANDS = {
    "plan": f"plan a.json {ON} {STAGES} --weights 2bw --optimizer adam --precision mixed",
    "plan-json": f"plan a.json {ON} {STAGES} --weights flush --schedule 1f1b --latency 0us --json",
    "nothing-fits": "plan a.json --gpus 2 --mem 1MB --weights 2bw --algorithm contiguous",
    "show": "show plan.json",
    "show-replicas": "show replicas.json",
    "show-segments": "show segments.json --links",
    "show-zb": "show zb.json",
    "simulate": "simulate plan.json --microbatches 6 --links",
    "simulate-loop": "simulate loop.json",
    "simulate-all": "simulate zb.json --schedule all --microbatches 8",
    "simulate-jitter": "simulate replicas.json --jitter 5% --runs 3",
    "simulate-json": "simulate loop.json --json",
    "simulate-halves": "simulate plan.json --microbatches 8 --width 70",
    "simulate-one": "simulate plan.json --microbatches 1",
    "simulate-several": "simulate plan.json --schedule 1f1b --schedule gpipe --jitter 5% --runs 3 --microbatches 16",
    "simulate-spread": "simulate zb.json --no-barrier --schedule zb2p --weight-keeps 50%",
    "show-shifts": "show shifts.json",
    "simulate-text": "simulate replicas.json --microbatches 4 --text",
    "simulate-trace": "simulate zb.json --microbatches 4 --trace -",
    "show-json": "show replicas.json --json",
    "compare": "compare a.json --gpus 1,2 --mem 1GB --algorithms contiguous,data-parallel --weights 2bw",
    "compare-json": "compare a.json --gpus 1,2 --mem 100MB,1GB --algorithms contiguous --weights 2bw --json",
    "compare-csv": f"compare a.json --gpus 2 --mem 1GB --algorithms contiguous --weights 2bw --csv - {BILL}",
    "compare-bill": f"compare a.json --gpus 1,2 --mem 5MB,1GB --algorithms contiguous --weights 2bw {BILL}",
    "bill": f"plan a.json {ON} {STAGES} --weights 2bw --tokens 3e6/100 --price 2.5 --verbose",
    "estimate": f"estimate zoo:gpt-tiny,blocks=2 --gpus 2 --gpu a100 {BILL}",
    "estimate-json": "estimate zoo:gpt-tiny,blocks=2 --gpus 2 --gpu a100 --samples 1e6 --json",
    "estimate-tensor": "estimate zoo:gpt-tiny,blocks=2 --gpus 4 --gpu h100 --tensor 2 --json",
    "profile": f"{ESTIMATED} -o estimated.json",
    "profile-engine": "profile zoo:gpt-tiny,blocks=1 --microbatch 2 --estimate a100 --engine compiled -o e.json",
    "calibrate": "calibrate estimate.json --gpu a100 --measured runs.csv",
    "calibrate-json": "calibrate estimate.json --gpu a100 --measured runs.csv --json",
    "import": IMPORTED,
    "import-json": f"{IMPORTED} --json",
    "grid": "grid a.json --gpus 4 --mem 1GB --batch 32 --microbatch 4,8",
    "synthesize": "synthesize loop.json --moves 20",
    "synthesize-json": "synthesize --gpus 2 --times 20,24,16 --microbatches 4 --limit 5 --moves 20 --json",
    "synthesize-equal": "synthesize --gpus 2 --placement loop --times 20,24,16 --microbatches 4 --moves 9 -o o.csv",
    "diff": "diff a.json b.json",
    "diff-all": "diff a.json b.json --all",
    "diff-plan": "diff a.json b.json --plan plan.json",
    "diff-json": "diff a.json b.json --plan plan.json --json",
    "diff-many": "diff many.json more.json",
    "diff-tight": "diff a.json saving.json --plan tight.json",
    "diff-run": "diff run.json trace.json --recalibrated again.json",
    "diff-run-json": "diff run.json trace.json --json",
    "diff-run-again": "diff run.json trace.json --recalibrated -",
    "diff-short": "diff run.json short.json",
    "check": "check replicas.json",
    "check-broken": "check broken.json",
    "check-json": "check plan.json --json",
    "check-schedule": "check loop.json --schedule loop.csv",
    "check-stuck": "check --schedule stuck.csv",
    "check-stuck-json": "check --schedule stuck.csv --json --semantics batched",
    "dry-run": "run zb.json --dry-run --steps 2",
    "dry-run-json": "run zb.json --dry-run --steps 2 --json",
    "dry-run-limit": "run driven.json --dry-run --steps 1 --limit 2",
    "show-driven": "show driven.json",
    "show-driven-json": "show driven.json --json",
    "check-driven": "check driven.json",
    "simulate-driven": "simulate driven.json",
    "simulate-driven-json": "simulate driven.json --json",
    "report-driven": "report driven.json -o page.html",
    "diff-driven": "diff a.json b.json --plan driven.json --json",
    "plan-nf1b": f"plan a.json {ON} --weights latest --accumulate 2 --vertical-sync --limit 3 --no-replicas",
    "check-nf1b": "check segments.json",
    "simulate-nf1b": "simulate segments.json",
    "simulate-nf1b-json": "simulate segments.json --json",
    "simulate-nf1b-all": "simulate segments.json --schedule all --json",
    "simulate-as-nf1b": "simulate plan.json --schedule nf1b --batch 16 --json",
    "simulate-depth": "simulate plan.json --schedule pipedream --depth 2 --json",
    "simulate-several-json": "simulate plan.json --schedule gpipe --schedule zb1p --jitter 5% --runs 3 --json",
    "report-nf1b": "report segments.json -o page.html --microbatches 8",
    "diff-nf1b": "diff a.json b.json --plan segments.json --json",
    "for": "plan gpt.json --gpus 2 --mem 1GB --bandwidth 1GB/s --for megatron --batch 8 -o for.json",
    "export-csv": "export loop.json --to torch-csv",
    "export-megatron": "export loop.json --to megatron",
    "report": "report replicas.json -o page.html",
    "report-zb": "report zb.json -o page.html --schedule gpipe --schedule 1f1b --schedule pipedream",
    "calibrate-few": "calibrate estimate.json --gpu a100 --measured few.csv --hosts-alone -o mine.json",
    "plan-out": f"plan a.json {ON} {STAGES} --weights 2bw -o new.json",
    "plan-stdout": f"plan a.json {ON} {STAGES} --weights 2bw --json -o -",
    "compare-out": "compare a.json --gpus 2 --mem 1GB --algorithms contiguous --weights 2bw --csv rows.csv",
    "import-out": f"{IMPORTED} -o today.json --best best.json",
    "import-stdout": f"{IMPORTED} -o - --best found.json",
    "import-best": IMPORTED.replace("train.sh", "best.sh"),
    "check-bounds": "check plan.json --bounds",
    "check-small": "check small.json --schedule gpipe.csv",
    "check-incomplete": "check --schedule short.csv",
    "check-incomplete-json": "check --schedule short.csv --json",
    "check-free": "check --schedule stuck.csv --semantics free",
    "check-free-json": "check --schedule loop.csv --semantics free --json",
    "simulate-best": "simulate zb.json --schedule best --schedule gpipe",
    "simulate-narrow": "simulate plan.json --schedule 1f1b --schedule gpipe --jitter 5% --runs 3 --width 70",
    "simulate-shares": "simulate zb.json --schedule dualpipev --pass-overlap 0% --weight-keeps 100% --width 40",
    "simulate-two-ways": "simulate zb.json --schedule dualpipev --pass-overlap 50%",
    "simulate-limit": "simulate driven.json --limit 1 --microbatches 3",
    "export-json": "export loop.json --to torch-csv --json",
    "export-out": "export loop.json --to torch-csv -o s.csv",
    "profile-quiet": "profile zoo:gpt-tiny,blocks=1 --microbatch 2 --estimate a100 -q -o q.json",
    "profile-refused": "profile zoo:gpt-tiny --microbatch 2 --estimate v100 --dtype bfloat16 --engine graphs -o q.json",
    "estimate-two": "estimate zoo:gpt-tiny,blocks=2 --gpus 4 --gpu h100 --tensor 2 --samples 1e6",
    "grid-servers": "grid a.json --platform servers.json --batch 32 --microbatch 8 -o grid.json",
    "grid-small": "grid a.json --gpus 4 --mem 8MB --batch 32 --microbatch 8",
    "synthesize-again": "synthesize again.json --moves 5",
    "diff-fewer": "diff a.json fewer.json --plan plan.json",
    "diff-fewer-json": "diff a.json fewer.json --plan plan.json --json",
    "help": "--help",
    "help-plan": "plan --help",
    "help-export": "export --help",
    "diff-order": "diff a.json fewer.json --match order",
    "diff-weights": "diff a.json b.json --match weights --json",
    "list-gpus": "list gpus",
    "list-schedules": "list schedules",
    "list-algorithms": "list algorithms --json",
    "list-profiles": "list profiles",
    "report-loop": "report loop.json -o page.html",
    "report-short": "report run.json -o page.html --trace short.json",
    "report-other": "report run.json -o page.html --trace other.json --microbatches 4",
    "report-run": "report run.json -o page.html --trace trace.json --microbatches 4",
}


def files(folder: Path) -> None:
    """Write what the commands read."""
    sizes, times = ("weight_bytes", "output_bytes", "saved_bytes"), ("forward_ns", "backward_ns", "optimizer_ns")
    layers = [
        replace(
            x, parameters=None, **{n: 10**4 * getattr(x, n) for n in sizes}, **{n: 10**5 * getattr(x, n) for n in times}
        )
        for x in CHAIN.layers
    ]
    chain = replace(CHAIN, layers=tuple(layers))
    slower = [replace(x, backward_ns=2 * x.backward_ns, saved_bytes=None) for x in chain.layers[1:]]
    (folder / "a.json").write_text(profile_text(chain))
    (folder / "fewer.json").write_text(profile_text(replace(chain, layers=(*chain.layers[:2], *chain.layers[3:]))))
    (folder / "b.json").write_text(profile_text(replace(chain, layers=(*chain.layers[:1], *slower[1:]), name="other")))
    levels = [{"count": 2, "bandwidth": "10GB/s"}, {"count": 2, "bandwidth": "1GB/s", "latency": "2us"}]
    kept = [replace(x, saved_bytes=2 * x.saved_bytes) for x in chain.layers]
    kept[4] = replace(kept[4], weight_bytes=2 * kept[4].weight_bytes)
    kept[1] = replace(kept[1], output_bytes=kept[1].output_bytes // 2)
    (folder / "saving.json").write_text(profile_text(replace(chain, layers=tuple(kept))))
    for name, step in (("many", 1), ("more", 3)):
        several = (replace(chain.layers[0], name=f"l{i}", forward_ns=10**6 + step * i * 10**4) for i in range(8))
        (folder / f"{name}.json").write_text(profile_text(replace(chain, layers=tuple(several), microbatch=step)))
    (folder / "servers.json").write_text(json.dumps({"levels": levels, "memory": "1GB"}))
    for name, words in MADE.items():
        done = called([*words.split(), "-o", name], folder)
        assert (done.code, done.raised) == (0, None), (name, done)
    solved = json.loads((folder / "zb.json").read_text())
    solved["provenance"] |= {"solver": "cbc", "solver_status": "optimal"}
    (folder / "zb.json").write_text(json.dumps(solved))
    broken = json.loads((folder / "plan.json").read_text())
    broken["stages"][0]["stop"], broken["gap"] = 2, 7
    (folder / "broken.json").write_text(json.dumps(broken))
    (folder / "loop.csv").write_text(called(EXPORTED.split(), folder).out)
    (folder / "stuck.csv").write_text(STUCK)
    (folder / "short.csv").write_text("0F0,0B0\n1F0\n")
    (folder / "gpipe.csv").write_text(called(GPIPE.split(), folder).out)
    names = ["embedding", *(f"block{i}" for i in range(4)), "head"]
    gpt = replace(chain, name="gpt", layers=tuple(replace(chain.layers[1], name=x) for x in names), microbatch=2)
    (folder / "gpt.json").write_text(profile_text(gpt))
    (folder / "best.sh").write_text("--num-layers 4 --pipeline-model-parallel-size 1 --global-batch-size 16")
    (folder / "train.sh").write_text("--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 16")
    of_a_model(folder)
    for name, words in MADE_LATER.items():
        done = called([*words.split(), "-o", name], folder)
        assert (done.code, done.raised) == (0, None), (name, done)


def of_a_model(folder: Path) -> None:
    """Write an estimated profile, runs of it, and a run and its trace."""
    from cases.measured import replayed, script_of
    from cases.plans import quick_bound

    from pipeplan.files.plans import plan_text
    from pipeplan.plan import Schedule
    from pipeplan.problem import Policy, Problem
    from pipeplan.report.traces import measured_trace
    from pipeplan.runtime.measure.report import TransferTime, make_report

    done = called([*ESTIMATED.split(), "-q", "-o", "estimate.json"], folder)
    assert (done.code, done.raised) == (0, None), done
    (folder / "runs.csv").write_text("ms,batch,gb\n" + "".join(f"{n + n % 3},{2 * n},0.1\n" for n in range(1, 10)))
    (folder / "few.csv").write_text("ms,batch\n2,2\n3,4\n")
    for name, steps in (("trace", 12), ("short", 2)):
        script = script_of(Policy("2bw", 2), Schedule(), steps, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
        found = replace(make_report(script, replayed(script, 3)), transfers=(TransferTime("F", 0, 1, 7 * 10**5, 1),))
        (folder / f"{name}.json").write_text(measured_trace(script.plan, found))
        if steps > 2:
            ends, last = [times[-1].end_ns for times in found.times], found.times[0][-1]
            beside = [
                replace(last, activity=kind, stage=stage, start_ns=ends[0] + start, end_ns=ends[0] + stop)
                for kind, stage, start, stop in (
                    ("AGREE", -1, 0, 10**6), ("REDUCE", 0, -(2 * 10**6), 10**6), ("REDUCE", 0, -(10**6), 5 * 10**5),
                    ("REDUCE", 0, 10**6, 2 * 10**6), ("WAIT_F", 0, 10**6, 2 * 10**6),
                )
            ]  # fmt: skip
            other = replace(found, times=((*found.times[0], *beside), *found.times[1:]))
            (folder / "other.json").write_text(measured_trace(script.plan, other))
        bound = quick_bound(Problem(script.plan.chain, script.plan.platform, script.plan.policy))
        plan = replace(script.plan, lower_bounds=(bound,))
        (folder / "run.json").write_text(plan_text(plan))
        (folder / "named.json").write_text(plan_text(replace(plan, chain=replace(plan.chain, name="a:b"))))


def printed(words: str, folder: Path) -> str:
    """Return what a command prints, or the text and the data of the page that it writes, without seconds and versions.

    Of a document in JSON each entry is a line.
    """
    quiet, few = (
        patch("pipeplan.cli.showing.QUIET_S", math.inf),
        patch("pipeplan.report.tables.differences.MOST_ROWS", 5),
    )
    before = {*folder.iterdir()}
    with quiet, few:  # no line of progress, and not very many of differences
        done = called(words.split(), folder)
    assert done.raised is None, done
    text = done.out + "".join(f"! {x}\n" for x in done.err.splitlines() if x.startswith(("error", "Error", "note")))
    if text.startswith(("{", "[")):
        text = entries(text)
    if words.startswith("profile"):
        text += done.err
    if (page := folder / "page.html").exists():
        whole = page.read_text()
        data = json.loads(whole.partition("const DATA = ")[2].partition(";")[0])
        told = re.sub(r"(?s)<(style|script).*?</\1>", "", whole)
        cells = [[" ".join(html.unescape(x).split()) for x in re.split("<[^>]+>", line)] for line in told.splitlines()]
        lines = ["|".join(filter(None, row)) for row in cells]
        lines += map(json.dumps, [*data.pop("charts").items(), *data.items()])
        lines += [" ".join(re.findall(x, whole)) for x in (r"width:[\d.]+%", r'[yh][^ ]*="[\d.]+"', r' d="[^"]*"')]
        text += "\n".join(filter(None, lines)) + "\n"
    for path in sorted({*folder.iterdir()} - before):
        text += f"made {path.name}\n"
        path.unlink()
    text = text.replace(str(folder), "HERE")
    if words.startswith("import") or " --for " in words:  # how near a bound comes to it in the time that it has
        text = re.sub(r'(?m)^bound .*\n|\d+\.\d+%$|(?<="bound_ns": )\d+|(?<="gap": )[\d.]+', "_", text)
    text = re.sub(r"\b\d+\.\d+ s\b|(?<=most CPU s).*", "_ s", text)
    text = re.sub(r"(?<=,)\d+\.\d+(?=,(?:True|False))", "_", text)
    text = re.sub(r'("seconds"[:,] )[\d.e-]+', r"\1_", text)
    text = re.sub(r"0\.1\.0[.\w]*", "VERSION", text)
    text = re.sub(r"Usage: \S.*?(?=( \w+)? \[OPTIONS\])", "Usage: pipeplan", text)
    return "\n".join(x.rstrip() for x in text.splitlines()) + "\n"


def entries(text: str) -> str:
    """Return a document in JSON with a line for each of its lists and objects, one for the rest; four digits."""
    found = json.loads(text)
    assert text in (json.dumps(found, indent=1) + "\n", json.dumps(found) + "\n"), "as documents are written"
    found = json.loads(text, parse_float=lambda x: float(f"{float(x):.4g}"))
    if isinstance(found, dict):
        plain = {key: x for key, x in found.items() if not isinstance(x, dict | list)}
        found = [plain, *({key: x} for key, x in found.items() if key not in plain)]
    return "\n".join(map(json.dumps, found)) + "\n"


def runs() -> dict[str, str]:
    """Return what is printed of made-up runs, in which operations took three times as long as planned."""
    from cases.measured import replayed, script_of

    from pipeplan.plan import Schedule
    from pipeplan.problem import Policy
    from pipeplan.report.tables.run import print_report
    from pipeplan.runtime.measure.report import DeviceMemory, DeviceState, ReadingTime, TransferTime, make_report

    script = script_of(Policy("2bw", 2), Schedule(), 12, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
    other = script_of(Policy("flush", 2), Schedule("flush", 2), 12, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
    plain, beside = (make_report(x, replayed(x, 3)) for x in (script, other))
    stages = tuple(replace(x, data_ns=10**5, data_wait_ns=10**6, sum_ns=10**6, sum_wait_ns=10**5) for x in plain.stages)
    full = replace(
        plain,
        stages=stages,
        bracket=(1.0, 1.2),
        kept_off=0.3,
        exchange="nccl",
        sums="nccl",
        forgotten=7,
        memory=(DeviceMemory(0, 0, 10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9, 2),),
        states=(DeviceState(0, 0, 10**6, 2 * 10**6, 10**6, 10**6),),
        reading=(ReadingTime(0, 0, 2, 10**6),),
        gradient_norms=(None, 1.0, 2.0),
        loss_scale=1024.0,
        skipped=(3,),
        evaluations={2: {"loss": 1.0}},
        best_step=2,
        ended_early=True,
    )
    away = replace(script.plan, chain=replace(script.plan.chain, device="a GPU"))
    sent = (TransferTime("F", 0, 1, 7 * 10**5, 2 * 10**5), TransferTime("B", 1, 1, 9 * 10**5, 2 * 10**5))
    small = script_of(Policy("2bw", 2), Schedule(), 1, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
    short = make_report(small, replayed(small, 2))
    driven = replace(script.plan, schedule=Schedule("message-driven", 2, 2), pattern=None)
    texts = {}
    for name, words in {
        "run-away": (away, replace(plain, transfers=sent, hardware=("b", "a"), forgotten=3), False, False),
        "run-short": (script.plan, short, False, False),
        "run-driven": (driven, plain, False, False),
        "run": (script.plan, plain, False, False),
        "run-full": (script.plan, full, False, False, (other.plan, beside)),
        "run-json": (script.plan, plain, False, True),
        "run-evaluate": (script.plan, plain, True, False),
    }.items():
        with redirect_stdout(io.StringIO()) as told:
            print_report(*words)
        texts[name] = entries(told.getvalue()) if name == "run-json" else told.getvalue()
    return {name: "\n".join(x.rstrip() for x in text.splitlines()) + "\n" for name, text in texts.items()}


def test_progress_is_told_of_the_first_and_the_last_update_and_each_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    from cases.plans import straight

    from pipeplan.report.tables.run import progress_printer
    from pipeplan.runtime.measure.progress import StepProgress

    tell = progress_printer(straight(), False, True)
    for step in range(1, 5):
        tell(StepProgress(step, 4, 1 / step, 10**6, 8.0, None if step < 4 else 2.0))
    tell(StepProgress(4, 4, 0.25, None, None, None, evaluation={"loss": 0.5, "accuracy": 0.75}, best=True))
    assert capsys.readouterr().err.splitlines() == [
        "update 1 of 4: loss 1.0000, 1.000 ms per microbatch",
        "update 4 of 4: loss 0.2500, gradient norm 2, 1.000 ms per microbatch",
        "update 4 of 4: on held-out data loss 0.5000, accuracy 0.7500, the best so far",
    ]


def plans(folder: Path) -> str:
    """Return what plans print of themselves: lines that none before has."""
    from pipeplan.files.plans import load_plan
    from pipeplan.plan import Alternative, Plan
    from pipeplan.report.page.html import chart_html
    from pipeplan.report.tables.plan import print_plan
    from pipeplan.report.tables.searches import print_grids

    names = ("plan", "zb", "loop", "replicas", "segments", "shifts", "parallel", "driven")
    plan, zb, loop, replicas, segments, shifts, parallel, driven = (load_plan(str(folder / f"{x}.json")) for x in names)

    def found(plan: Plan, fields: dict[str, Any] | None = None, **options: Any) -> Plan:
        provenance = replace(plan.provenance, options=plan.provenance.options | options, **(fields or {}))
        return replace(plan, provenance=provenance)

    def of(plan: Plan, **fields: Any) -> Plan:
        return replace(plan, chain=replace(plan.chain, **fields))

    ms, others = 10**6, [Alternative(w, n, ns) for w, n, ns in CHANGES]
    period = 10_312_500
    cases = {
        "plan": plan,
        "solver": found(plan, {"solver_status": "interrupted", "claimed_period_ns": 9 * ms, "algorithm": "madpipe"}),
        "limit": found(driven, {"solver_status": "time limit"}),
        "alternatives": found(plan, {"alternatives": tuple(others)}),
        "estimated": of(found(plan, {"alternatives": tuple(others)}, pipeline_ns=11 * ms), within=(0.8, 1.3)),
        "zero": found(plan, zero={"0": 11 * ms, "1": None, "3": 0}),
        "unpipelined": found(plan, unpipelined_ns=9 * ms),
        "pipelined": found(plan, unpipelined_ns=11 * ms),
        "orders": found(plan, layer_order={"orders": 3}),
        "one order": found(plan, layer_order={"orders": 1}),
        "another": of(plan, order=(1, 0, 2, 3, 4)),
        "tensor": found(
            of(plan, tensor=2, sequence_parallel=True, within=(0.9, 1.2)),
            tensor={
                "1": {"period_ns": 11 * ms, "bound_ns": 9 * ms},
                "2": {"period_ns": period},
                "4": {},
                "8": {"bound_ns": 1},
            },
        ),
        "experts": of(plan, experts=2, imbalance=1.5, context=2, selective=True, tensor=2, offloaded=10**9),
        "even": of(plan, experts=2, context=2, by_heads=True),
        "near": of(
            found(plan, zero={"1": period + 9 * 10**4}, unpipelined_ns=period + 10**5, pipeline_ns=period + 2 * 10**5),
            within=(0.9, 1.2),
        ),
        "grids": found(
            of(plan, within=(0.9, 1.2)),
            grid={"batch_ns": 100, "microbatch": 8},
            grids=[{"inter": 1, "data": 2, "microbatch": 8, "batch_ns": 104}, {"inter": 2, "data": 1, "microbatch": 4}],
        ),
        "resumed": found(
            plan,
            resumed={
                "held_bytes": 10**7,
                "coming_bytes": 10**6,
                "best_period_ns": 10 * ms,
                "best_coming_bytes": 2 * ms,
            },
        ),
        "came": found(replicas, resumed={"held_bytes": 10**7}),
        "zb": zb,
        "for": found(zb, **{"for": "torch", "price": {"any": 9 * ms, "1f1b": 10**8}, "binds": "memory"}),
        "order": found(zb, order={"bound_ns": 10**7, "value_ns": 11 * ms}),
        "proved": found(zb, order={"bound_ns": 10**7, "value_ns": 10**7}),
        "policy": replace(
            zb,
            policy=replace(
                zb.policy, zero=2, offload=True, clip=True, bytes_per_parameter=18, shared_bytes_per_parameter=12
            ),
        ),
        "platform": replace(
            plan, platform=replace(plan.platform, blocking=True, overhead_ns=500, reserved_bytes=10**6)
        ),
        "reading": of(plan, reading_ns=30 * ms, device="a GPU"),
        "shifts": shifts,
        "parallel": found(parallel, pipeline_ns=None),
        "beside": of(found(parallel, pipeline_ns=13 * ms), within=(0.9, 1.2)),
        "loop": loop,
        "replicas": replicas,
        "segments": segments,
    }
    parts, seen = [], set[str]()
    for name, each in cases.items():
        with redirect_stdout(io.StringIO()) as told:
            print_plan(each, ("layers are made up",) if name == "plan" else (), verbose=name == "plan")
        lines = [x.rstrip() for x in told.getvalue().splitlines()]
        parts += [f"$ {name}", *(x for x in lines if x not in seen)]
        seen.update(lines)
    grid = {
        "inter": 2, "data": 1, "microbatch": 8, "ac": 1, "offload": True, "placement": "pipeline", "limit": 2,
        "batch_ns": 110 * ms, "simulated": "one pipeline",
    }  # fmt: skip
    others = [{"inter": 4, "data": 1, "reason": "too small"}, grid | {"inter": 1, "simulated": "in full"}, grid]
    with redirect_stdout(io.StringIO()) as told:
        print_grids(found(replicas, grid=grid, batch=16, bound_ns=99 * ms, microbatches=[8], grids=others))
        frame = chart_html(loop)
        print(frame[:16], frame.count("pattern"), frame[-50:])
    lines = [x.rstrip() for x in told.getvalue().splitlines()]
    parts += ["$ grids", *(x for x in lines if x not in seen)]
    called = ("model.embed.tokens", "model.h.0.attention.core", "model.h.1.mlp(gelu)", "model.norm..scale", "head")
    layers = [replace(x, name=name) for x, name in zip(plan.chain.layers, called, strict=True)]
    dotted = of(plan, layers=tuple(layers))
    for width in (40, *range(64, 92), *range(109, 115), 130, 150):
        with redirect_stdout(io.StringIO()) as told:
            print_plan(dotted, width=width)
        rows = [x.rstrip() for x in told.getvalue().splitlines() if re.match(r"\d +\d-", x)]
        parts += [f"$ {width}", *rows]
    return "\n".join(parts) + "\n"


def measured(folder: Path) -> str:
    """Return what is told of models that were measured, or estimated, and of profiles in which layers were merged."""
    from pipeplan.files.profiles import read_profile
    from pipeplan.report.tables.measurements import print_measurements
    from pipeplan.runtime.profiler.measure import LayerMeasurement, MeasuredModel

    chain = read_profile(str(folder / "a.json"))
    half = replace(chain.layers[1], forward_ns=chain.layers[1].forward_ns // 2, backward_ns=0)
    parts = (chain.layers[0], half, replace(half, backward_ns=chain.layers[1].backward_ns), *chain.layers[2:])
    steady = tuple(LayerMeasurement(x, 5, 10**5 * i, 2 * 10**4) for i, x in enumerate(parts))
    whole = tuple(LayerMeasurement(x, 5, 0, 10**6 * (i % 2)) for i, x in enumerate(chain.layers))
    tied = ((0, 2), (1, 3), (1, 4))
    text = ""
    for found, told in (
        (steady, replace(chain, device="some CPU, 1 thread", beside=3, reading_ns=10**6, tied=tied)),
        (whole, replace(chain, device="a GPU", beside=2, reading_ns=10**6, tied=tied[:1])),
        (steady[:2] + steady[3:], replace(chain, within=(0.5, 2.0))),
    ):
        with redirect_stderr(io.StringIO()) as err:
            print_measurements(MeasuredModel(chain, found, False, (), (1, 2) if told.within else ()), told)
        text += err.getvalue()
    return "\n".join(x.rstrip() for x in text.splitlines()) + "\n"


def test_what_is_told_of_measured_layers_is_what_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert measured(folder) == (KEPT / "measured.txt").read_text()


def played(folder: Path) -> str:
    """Return what runs are asked for and tell, by ``run_plan`` that only tells of two updates; lines none before has.

    Then what the ranks of torchrun tell each other, and what is left of a run that is stopped.
    """
    from dataclasses import fields

    import click
    from cases.measured import replayed, script_of

    from pipeplan.errors import BadInput, RunStopped
    from pipeplan.plan import Plan, Schedule
    from pipeplan.problem import Policy
    from pipeplan.runtime.measure.progress import StepProgress
    from pipeplan.runtime.measure.report import make_report

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
        patch.dict(sys.modules, {"torch.utils.tensorboard": SimpleNamespace(SummaryWriter=Writer)}),
    ):
        for words in PLAYED:
            lines += line(words)
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


def test_what_runs_are_asked_for_is_what_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert played(folder) == (KEPT / "played.txt").read_text()


RUNS = ("run", "run-full", "run-json", "run-evaluate", "run-away", "run-short", "run-driven")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_s_report_is_what_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("COLUMNS", "120")
    assert runs()[name] == (KEPT / f"{name}.txt").read_text()


def test_what_plans_say_is_what_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert plans(folder) == (KEPT / "plans.txt").read_text()


def refusals(folder: Path) -> str:
    """Return what commands say that are refused."""
    return "".join(f"{words}: {printed(words, folder)}" for words in REFUSED.split("\n")[1:-1])


def test_what_is_refused_is_said_as_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert refusals(folder) == (KEPT / "refused.txt").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    made = tmp_path_factory.mktemp("printed")
    files(made)
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_is_kept(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert printed(COMMANDS[name], folder) == (KEPT / f"{name}.txt").read_text()


if __name__ == "__main__":
    import tempfile

    os.environ["COLUMNS"] = "120"
    with tempfile.TemporaryDirectory() as made:
        files(Path(made))
        for name, words in COMMANDS.items():
            (KEPT / f"{name}.txt").write_text(printed(words, Path(made)))
        (KEPT / "plans.txt").write_text(plans(Path(made)))
        (KEPT / "refused.txt").write_text(refusals(Path(made)))
        (KEPT / "played.txt").write_text(played(Path(made)))
        (KEPT / "measured.txt").write_text(measured(Path(made)))
    for name, text in runs().items():
        (KEPT / f"{name}.txt").write_text(text)
