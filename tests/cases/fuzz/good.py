"""A good file of every kind, small, written into a folder: what the fuzzers break, and name in commands."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

from cases.chains import random_chain
from cases.even_profile import PROFILE
from cases.files import CHAIN, small_plan
from cases.fuzz.judge import called
from cases.measured import replayed

from pipeplan.files.plans import load_plan, plan_text
from pipeplan.files.profiles import profile_text
from pipeplan.plan import Plan
from pipeplan.report.traces import measured_trace
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.measure.report import make_report

ZOO_PROFILE = Path(__file__).parents[3] / "profiles" / "gpt-tiny-b8-cpu.json"
FLAT = ["--gpus", "2", "--mem", "1GB"]
LEVELS = {
    "levels": [{"count": 2, "bandwidth": "50GB/s", "latency": "2us"}, {"count": 2, "bandwidth": "10Gbps", "links": 1}],
    "memory": "1GiB",
    "full_duplex": True,
}
UNEQUAL = {
    "levels": [{"count": 3, "bandwidth": "12GB/s"}],
    "devices": [{"memory": "1GB"}, {"memory": "800MB", "speed": 1.5}, {"memory": "1GB", "speed": 0.5}],
}
NODES = {  # forward and backward time, activations and parameters
    "Input0": ("0.000", "0.000", "602112.0", "0.000"),
    "Conv2d(3, 64)": ("1.5", "3.25", "1605632", "9408"),
    "ReLU()": ("0.500", "0.25", "1605632.0", "0.000"),
    "Add": ("0.125", "5e-1", "[802816; 802816]", "0"),
    "Linear": ("2", "4.0", "4e3", "4096 -- stage_id=1"),
}
GRAPH = "".join(
    f"node{i} -- {name} -- forward_compute_time={forward}, backward_compute_time={backward}, "
    f"activation_size={activation}, parameter_size={parameter}\n"
    for i, (name, (forward, backward, activation, parameter)) in enumerate(NODES.items(), 1)
) + "".join(f"\tnode{i} -- node{j}\n" for i, j in ((1, 2), (2, 3), (3, 4), (2, 4), (4, 5)))
ACCELERATOR = {
    "name": "mine", "memory": "8GiB", "bandwidth": "50GB/s", "tflops": {"float32": 1.5, "float16": 6}, "link": "10GB/s",
    "launch": "2us",
}  # fmt: skip
RANKS = {"rank-00000.pt": b"0" * 100, "rank-00001.pt": b"1" * 20}  # what a checkpoint's files hold
RUN_JSON = {
    "format": "pipeplan-checkpoint/2",
    "position": {"step": 40, "microbatch": 80},
    "model": "gpt-tiny",
    "seed": 0,
    "files": {name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in RANKS.items()},
    "crc32": 0,
}  # fmt: skip
PLANS = {  # how each kind of plan is made
    "pattern": ["plan", "chain.json", *FLAT],
    "replicas": [
        "plan", "even.json", "--gpus", "3", "--mem", "1GB", "--algorithm", "contiguous", "--optimizer", "adam",
    ],
    "stash": ["plan", "dag.json", *FLAT, "--weights", "stash", "--vertical-sync", "--algorithm", "pipedream"],
    "flush": ["plan", "even.json", *FLAT, "--weights", "flush", "--algorithm", "contiguous", "--no-replicas"],
    "nf1b": ["plan", "even.json", *FLAT, "--weights", "latest", "--accumulate", "2"],
    "messages": ["plan", "even.json", *FLAT, "--weights", "flush", "--schedule", "message-driven"],
    "grid": ["grid", "even.json", "--gpus", "4", "--mem", "1GB", "--batch", "32", "--microbatch", "2,4"],
    "levels": ["plan", "dag.json", "--platform", "levels-platform.json", "--algorithm", "contiguous"],
    "unequal": ["plan", "even.json", "--platform", "unequal-platform.json", "--algorithm", "contiguous"],
    "mixed": [
        "plan", "tied.json", *FLAT, "--precision", "mixed", "--offload", "--optimizer", "adam", "--weights", "flush",
    ],
    "special": ["plan", "even.json", *FLAT, "--algorithm", "madpipe", "--no-replicas"],
    "zoo": ["plan", "zoo.json", *FLAT, "--algorithm", "contiguous", "--no-replicas"],
}  # fmt: skip


TRACED = ("zoo", "flush", "special")  # plans whose runs have a trace


def in_folder(folder: Path, good: Path | None) -> dict[str, list[str]]:
    """Have good files in ``folder``, copied from those in ``good/files`` if that is given; return their names."""
    if good is None:
        return good_files(folder)
    shutil.copytree(good / "files", folder, dirs_exist_ok=True)
    return dict(json.loads((good / "names.json").read_text()))


def good_files(folder: Path) -> dict[str, list[str]]:
    """Write good files of every kind into ``folder`` and return their names by kind."""
    rng = random.Random(7)
    dag = random_chain(rng, 6, edges=True, saved=True, optimizer=True, largest=10**6)
    tied = random_chain(rng, 5, tied=True, saved=True, largest=10**6)
    profiles = {"chain": profile_text(CHAIN), "dag": profile_text(dag), "tied": profile_text(tied)}
    profiles |= {"even": json.dumps(PROFILE), "zoo": ZOO_PROFILE.read_text()}
    found: dict[str, dict[str, str]] = {
        "profile": {f"{name}.json": text for name, text in profiles.items()},
        "graph": {"graph.txt": GRAPH},
        "platform": {"levels-platform.json": json.dumps(LEVELS), "unequal-platform.json": json.dumps(UNEQUAL)},
        "accelerator": {"accelerator.json": json.dumps(ACCELERATOR)},
        "checkpoint": {"run.json": summed(RUN_JSON)},
    }
    for files in found.values():
        _write(folder, files)
    for name, arguments in PLANS.items():
        quick = [] if "--algorithm" in arguments else ["--effort", "quick"]
        done = called([*arguments, *quick, "-o", f"{name}-plan.json"], folder)
        assert (done.code, done.raised) == (0, None), (name, done)
    found["plan"] = {f"{name}-plan.json": (folder / f"{name}-plan.json").read_text() for name in PLANS}
    small = {"small-plan.json": plan_text(small_plan()), "drained-plan.json": plan_text(small_plan("flush"))}
    _write(folder, small)
    found["plan"] |= small
    found["trace"] = {f"{name}-trace.json": _trace(load_plan(str(folder / f"{name}-plan.json"))) for name in TRACED}
    _write(folder, found["trace"])
    return {kind: list(files) for kind, files in found.items()}


def summed(document: dict[str, Any]) -> str:
    """Return the JSON of a checkpoint's ``run.json`` with the checksum that goes with it."""
    text = json.dumps(document | {"crc32": 0}, separators=(",", ":"), ensure_ascii=False)
    return json.dumps(document | {"crc32": zlib.crc32(text.encode())})


def _trace(plan: Plan) -> str:
    script = lower_run(plan, 12)
    return measured_trace(plan, make_report(script, replayed(script, 2)))


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
