"""Which command reads which kind of file? Broken files of every kind, each with a command that has to read it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from cases.fuzz.broken import broken_bytes, odd_json, odd_text
from cases.fuzz.good import RANKS, in_folder, summed
from cases.fuzz.judge import Case, called, faults, snapshot, watched, written_faults

from pipeplan.errors import BadInput
from pipeplan.files.plans import plan_text, read_plan
from pipeplan.files.profiles import ProfileFile, chain_of, digest
from pipeplan.names import SENTENCE, shown

CHECKPOINTS = "checkpoints"
OUTPUTS = ("out.json", "out.html", "out.csv", "out.py")
QUICK = "--gpus 2 --mem 1GB --algorithm contiguous --weights 2bw --time-limit 1s"  # one search: reading is tried
# Commands by the kind of file that they read; {} is the broken one, others are good.
READERS: dict[str, tuple[str, ...]] = {
    "profile": (
        f"plan {{}} {QUICK} -o out.json",
        f"plan {{}} {QUICK} --no-replicas --json",
        "plan {} --gpus 2 --mem 100MB --algorithm pipedream --weights stash -o out.json",
        f"plan {{}} {QUICK} --granularity articulation --precision mixed --optimizer adam",
        "plan {} --gpus 2 --mem 1GB --algorithm balance --weights flush --granularity 10% -o out.json",
        f"plan - {QUICK} -o out.json",
        "compare {} --gpus 1,2 --mem 1GB --algorithms contiguous,pipedream --weights 2bw --time-limit 1s --csv out.csv",
        "grid {} --time-limit 1s --gpus 2 --mem 1GB --batch 16 --microbatch 1,8 -o out.json",
        "grid even.json --time-limit 1s --gpus 2 --mem 1GB --batch 16 --microbatch-profile {}",
        "diff {} zoo.json",
        "diff zoo.json {} --json",
        "diff zoo.json - --all",
        "diff even.json {} --plan replicas-plan.json",
        "diff {} {}",
    ),
    "graph": (
        f"plan {{}} {QUICK} -o out.json",
        "plan {} --gpus 2 --mem 1GB --algorithm pipedream --weights stash --json",
        "diff zoo.json {}",
        f"plan - {QUICK}",
    ),
    "platform": (
        "plan even.json --platform {} --algorithm contiguous --weights 2bw --time-limit 1s -o out.json",
        "plan dag.json --platform {} --algorithm pipedream --weights stash --time-limit 1s --json",
        "plan zoo.json --platform - --algorithm data-parallel --weights 2bw",
        "grid even.json --time-limit 1s --platform {} --batch 32 --microbatch 4 -o out.json",
    ),
    "plan": (
        "check {}",
        "check {} --json",
        "check -",
        "show {}",
        "show {} --json",
        "simulate {}",
        "simulate {} --schedule all --microbatches 8",
        "simulate {} --trace out.json --json --jitter 5% --runs 2",
        "report {} -o out.html",
        "export {} --to torch-csv --schedule 1f1b --microbatches 4 -o out.csv",
        "export {} --to megatron",
        "export {} --to torchtitan --json",
        "run {} --dry-run --steps 3",
        "run {} --dry-run --steps 2 --json --schedule message-driven",
        "diff even.json even.json --plan {} --json",
        "diff {} zoo-trace.json",
    ),
    "trace": (
        "diff {plan} {}",
        "diff {plan} {} --json",
        "diff {plan} {} --recalibrated out.json",
        "report {plan} --trace {} -o out.html",
        "diff {plan} - --json --recalibrated out.json",
    ),
    "accelerator": (
        "plan even.json --gpus 2 --gpu {} --algorithm contiguous --weights 2bw -o out.json",
        "plan even.json --gpus 2 --gpu {} --algorithm balance --weights 2bw --json",
    ),
    "checkpoint": ("",),
}
SHARES = {"profile": 4, "graph": 3, "platform": 1, "plan": 6, "trace": 4, "accelerator": 1, "checkpoint": 1}


class Readers:
    """Broken files for the commands in a folder of good ones; the same ``seed`` and index give the same case."""

    def __init__(self, folder: Path, good: Path | None = None) -> None:
        self.folder = folder
        self.good = in_folder(folder, good)

    def case(self, seed: int, index: int, kinds: Sequence[str] = tuple(READERS)) -> Case:
        """Return case ``index``."""
        rng = random.Random(f"{seed}/reader/{index}")
        kind = rng.choices(kinds, [SHARES[kind] for kind in kinds])[0]
        good = rng.choice(self.good[kind])
        data = (self.folder / good).read_bytes()
        name = f"broken{Path(good).suffix}"
        if rng.random() < 0.4:
            data = broken_bytes(rng, data)
        elif kind == "graph":
            data = odd_text(rng, data)
        else:
            data = odd_json(rng, json.loads(data)).encode(errors="replace")
        if kind == "plan" and rng.random() < 0.7:
            data = self._consistent(name, data)
        if kind == "checkpoint" and rng.random() < 0.7:
            with suppress(ValueError, TypeError, RecursionError):
                data = summed(json.loads(data)).encode()
        command = rng.choice(READERS[kind])
        plan = good.replace("-trace", "-plan")
        arguments = (word.replace("{plan}", plan).replace("{}", name) for word in command.split())
        return Case(kind, name, data, tuple(arguments))

    def _consistent(self, name: str, data: bytes) -> bytes:
        """Return a broken plan with the digest and the figures that go with it, where it still has some.

        Else nearly all broken plans would be told by these alone, and nothing behind that would be tried.
        """
        texts = [data]

        def consistent() -> None:
            document = json.loads(data)
            keys = {key: value for key, value in document["profile"].items() if key != "digest"}
            document["profile"]["digest"] = digest(chain_of(msgspec.convert(keys, ProfileFile), name))
            texts.append(json.dumps(document).encode())
            (self.folder / name).write_bytes(texts[-1])
            plan, found = read_plan(name)
            if all(sentence.startswith(("devices", "gap ", "lower_bounds:")) for sentence in found):
                texts.append(plan_text(plan).encode())

        watched(consistent, self.folder)  # what goes wrong here goes wrong again in the command
        return texts[-1]

    def faults(self, case: Case) -> list[str]:
        """Run the case's command in the folder and return the rules that it broke."""
        if case.kind == "checkpoint":
            return self._checkpoint_faults(case)
        (self.folder / case.name).write_bytes(case.data)
        before = snapshot(self.folder)
        outcome = called(case.arguments, self.folder, case.data)
        after = snapshot(self.folder)
        names = [word for word in case.arguments if (self.folder / word).is_file() or word == "-"]
        if {"--microbatch-profile", "--schedule", "--plan"} & {*case.arguments}:
            names = []  # it may not go with another profile, or with a schedule: no fault of the file
        elif "--dry-run" in case.arguments:
            names.append("plan: ")
        found = faults(outcome, before, after, names, OUTPUTS) + written_faults(outcome, case.arguments, self.folder)
        for name in OUTPUTS:
            (self.folder / name).unlink(missing_ok=True)
        return found

    def _checkpoint_faults(self, case: Case) -> list[str]:
        from pipeplan.runtime.training.state.checkpoint import newest

        folder = self.folder / CHECKPOINTS / "step-00000040"
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in (RANKS | {"run.json": case.data}).items():
            (folder / name).write_bytes(data)

        def look() -> None:
            try:
                newest(folder.parent)
            except BadInput as error:
                print(f"error: {shown(str(error), SENTENCE)}", file=sys.stderr)
                raise SystemExit(error.exit_code) from error

        before = snapshot(folder)
        outcome = watched(look, self.folder)
        return faults(outcome, before, snapshot(folder), [CHECKPOINTS])
