"""What do commands print, on small files that commands have made? Without what differs from run to run."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from pipeplan.files.plans import plan_text
from pipeplan.files.profiles import profile_text
from pipeplan.plan import Schedule
from pipeplan.problem import Policy, Problem
from pipeplan.report.traces import measured_trace

from .fuzz.judge import called
from .kept import check_kept
from .mutations import CHAIN

KEPT = Path(__file__).parents[1] / "report" / "printed"
ON = "--gpus 2 --mem 1GB --bandwidth 1GB/s"
STAGES = "--split 3,2 --on 0/1"
EXPORTED, ESTIMATED = "export loop.json --to torch-csv", "profile zoo:gpt-tiny,blocks=2 --microbatch 2 --estimate a100"
STUCK = """0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1
"""
GPIPE = "export zb.json --to torch-csv --schedule gpipe"
IMPORTED = "import gpt.json train.sh --from megatron --gpus 4 --mem 1GB --effort quick"
MADE = {  # files of their own, each by a command
    "plan.json": f"plan a.json {ON} {STAGES} --weights 2bw --optimizer adam",
    "zb.json": f"plan a.json {ON} {STAGES} --weights flush --schedule zb1p --accumulate 4",
    "loop.json": f"plan a.json {ON} --split 1,1,1,2 --on 0/1/0/1 --weights flush --schedule interleaved --accumulate 4",
    "driven.json": f"plan a.json {ON} {STAGES} --schedule message-driven --accumulate 4 --limit 3",
    "shifts.json": f"plan a.json {ON} --split 1,1,3 --on 0/1/0 --weights stash",
    "parallel.json": f"plan a.json {ON} --split 5 --on 0-1 --weights stash",
    "tight.json": "plan a.json --gpus 2 --mem 14MB --bandwidth 1GB/s --split 3,2 --on 0/1 --weights 2bw",
    "replicas.json": "plan a.json --platform servers.json --split 2,3 --on 0-1/2-3 --weights stash",
    "uneven.json": "plan a.json --platform servers.json --split 2,3 --on 0/1-3 --weights stash",
    "wide.json": "plan a.json --gpus 19 --mem 1GB --split 2,3 --on 0-15/17-18 --weights stash",
    "one.json": "plan a.json --gpus 1 --mem 1GB --algorithm balance --weights stash",
    "small.json": f"plan a.json --gpus 2 --mem 12MB --bandwidth 1GB/s {STAGES} --weights flush --schedule 1f1b",
    "again.json": f"plan a.json {ON} --split 2,3 --on 0/1 --recompute all --weights flush --schedule 1f1b",
    "segments.json": f"plan a.json {ON} --split 2,3 --on 0/1 --recompute all --weights latest --optimizer momentum",
}
MADE_LATER = {"zoo.json": f"plan estimate.json {ON} --weights flush --schedule 1f1b --accumulate 2"}


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
    longer = [replace(x, name=f"encoder.a_long_name.of.layer.{x.name}") for x in slower]
    (folder / "long.json").write_text(profile_text(replace(chain, layers=(chain.layers[0], *longer))))
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
    wrong = json.loads((folder / "plan.json").read_text())
    wrong |= {"gap": 7, "samples_per_update": 1}
    wrong["devices"][0]["peak_bytes"], wrong["delays"][0]["most"], wrong["groups"][1]["number"] = 1, 5, 6
    (folder / "wrong.json").write_text(json.dumps(wrong))
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
    from pipeplan.runtime.measure.report import TransferTime, make_report

    from .measured import replayed, script_of
    from .plans import quick_bound

    done = called([*ESTIMATED.split(), "-q", "-o", "estimate.json"], folder)
    assert (done.code, done.raised) == (0, None), done
    (folder / "runs.csv").write_text("ms,batch,gb\n" + "".join(f"{n + n % 3},{2 * n},0.1\n" for n in range(1, 10)))
    (folder / "few.csv").write_text("ms,batch\n2,2\n3,4\n")
    for name, weights, schedule, steps in (
        ("drained", "flush", Schedule("flush", 2), 12),
        ("trace", "2bw", Schedule(), 12),
        ("short", "2bw", Schedule(), 2),
    ):
        script = script_of(Policy(weights, 2), schedule, steps, ((10**6, 2 * 10**6), (10**6, 3 * 10**6)), 10**5)
        found = replace(make_report(script, replayed(script, 3)), transfers=(TransferTime("F", 0, 1, 7 * 10**5, 1),))
        late = ([replace(x, start_ns=x.start_ns + 7777, end_ns=x.end_ns + 7777) for x in row] for row in found.times)
        found = replace(found, times=tuple(map(tuple, late)))
        (folder / f"{name}.json").write_text(measured_trace(script.plan, found))
        if name == "trace":
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
        (folder / ("drained-run.json" if name == "drained" else "run.json")).write_text(plan_text(plan))
        (folder / "named.json").write_text(plan_text(replace(plan, chain=replace(plan.chain, name="a:b"))))


def printed(words: str, folder: Path) -> str:
    """Return what a command prints, or the text and the data of the page that it writes, without seconds and versions.

    Of a document in JSON each entry is a line. A command behind ``bold`` prints on a terminal that has colours.
    """
    quiet, few = (
        patch("pipeplan.cli.showing.QUIET_S", math.inf),
        patch("pipeplan.report.tables.differences.MOST_ROWS", 5),
    )
    before = {*folder.iterdir()}
    colours = {"FORCE_COLOR": "1", "TERM": "xterm"} if words.startswith("bold ") else {}
    with quiet, few, patch.dict(os.environ, colours):  # no line of progress, and not very many of differences
        done = called(shlex.split(words.removeprefix("bold ")), folder)
    assert done.raised is None, done
    text = done.out + "".join(
        f"! {x}\n" for x in done.err.splitlines() if x.startswith(("error", "Error", "note", "the time limit"))
    )
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
        shapes = (
            r"width:[\d.]+%",
            r'[yh][^ ]*="-?[\d.]+"',
            r' d="[^"]*"',
            r"<th class=left>[^<]*",
            r'data-[a-z]+="[^"]*"',
        )
        lines += [" ".join(re.findall(x, whole)) for x in shapes]
        text += "\n".join(filter(None, lines)) + "\n"
    for path in sorted({*folder.iterdir()} - before):
        text += f"made {path.name}\n"
        text += path.read_text() if path.stat().st_size < 1000 else ""
        path.unlink()
    text = text.replace(str(folder), "HERE")
    if words.startswith("import") or " --for " in words:  # how near a bound comes to it in the time that it has
        text = re.sub(r'(?m)^bound .*\n|\d+\.\d+%$|(?<="bound_ns": )\d+|(?<="gap": )[\d.]+', "_", text)
    text = re.sub(r"\b\d+\.\d+ s\b|(?<=most CPU s).*", "_ s", text)
    text = re.sub(r"(?<=,)\d+\.\d+(?=,(?:True|False))", "_", text)
    text = re.sub(r'("seconds"[:,] )[\d.e-]+', r"\1_", text)
    text = re.sub(r"0\.1\.0[.\w]*", "VERSION", text)
    text = re.sub(r"Usage: \S.*?(?=( \w+)? \[OPTIONS\])", "Usage: pipeplan", text)
    return without_ends(text)


def entries(text: str) -> str:
    """Return a document in JSON with a line for each of its lists and objects, one for the rest; four digits."""
    found = json.loads(text)
    assert text in (json.dumps(found, indent=1) + "\n", json.dumps(found) + "\n"), "as documents are written"
    found = json.loads(text, parse_float=lambda x: float(f"{float(x):.4g}"))
    if isinstance(found, dict):
        plain = {key: x for key, x in found.items() if not isinstance(x, dict | list)}
        found = [plain, *({key: x} for key, x in found.items() if key not in plain)]
    return "\n".join(map(json.dumps, found)) + "\n"


def without_ends(text: str) -> str:
    """Return lines without the spaces at their ends."""
    return "\n".join(x.rstrip() for x in text.splitlines()) + "\n"


def check_printed(text: str, name: str) -> None:
    """Assert that ``text`` is what is kept by a name."""
    check_kept(text, KEPT / f"{name}.txt")
