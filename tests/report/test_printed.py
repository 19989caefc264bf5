"""Do commands print what they printed? Each on the same small files, beside what is kept in ``printed/``.

``python tests/report/test_printed.py`` keeps what they print now: read the difference before it is committed.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from cases.fuzz.judge import called
from cases.mutations import CHAIN

from pipeplan.files.profiles import profile_text

KEPT = Path(__file__).parent / "printed"
ON = "--gpus 2 --mem 1GB --bandwidth 1GB/s"
STAGES = "--split 3,2 --on 0/1"
MADE = {  # files of their own, each by a command
    "plan.json": f"plan a.json {ON} {STAGES} --weights 2bw --optimizer adam",
    "zb.json": f"plan a.json {ON} {STAGES} --weights flush --schedule zb1p --accumulate 4",
    "loop.json": f"plan a.json {ON} --split 1,1,1,2 --on 0/1/0/1 --weights flush --schedule interleaved --accumulate 4",
    "replicas.json": "plan a.json --platform servers.json --split 2,3 --on 0-1/2-3 --weights stash",
    "segments.json": f"plan a.json {ON} --split 2,3 --on 0/1 --recompute all --weights latest --optimizer momentum",
}
COMMANDS = {
    "plan": f"plan a.json {ON} {STAGES} --weights 2bw --optimizer adam --precision mixed",
    "plan-json": f"plan a.json {ON} {STAGES} --weights flush --schedule 1f1b --json",
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
    "compare": "compare a.json --gpus 1,2 --mem 1GB --algorithms contiguous,data-parallel --weights 2bw",
    "grid": "grid a.json --gpus 4 --mem 1GB --batch 32 --microbatch 4,8",
    "synthesize": "synthesize loop.json --moves 20",
    "diff": "diff a.json b.json",
    "diff-all": "diff a.json b.json --all",
    "diff-plan": "diff a.json b.json --plan plan.json",
    "check": "check replicas.json",
    "check-broken": "check broken.json",
    "dry-run": "run zb.json --dry-run --steps 2",
    "export-csv": "export loop.json --to torch-csv",
    "export-megatron": "export loop.json --to megatron",
    "export-deepspeed": "export zb.json --to deepspeed --schedule 1f1b",
    "report": "report replicas.json -o page.html",
    "report-zb": "report zb.json -o page.html",
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
    (folder / "b.json").write_text(profile_text(replace(chain, layers=(*chain.layers[:1], *slower[1:]), name="other")))
    levels = [{"count": 2, "bandwidth": "10GB/s"}, {"count": 2, "bandwidth": "1GB/s", "latency": "2us"}]
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


def printed(words: str, folder: Path) -> str:
    """Return what a command prints, or the text of the page that it writes, without seconds and versions."""
    done = called(words.split(), folder)
    assert done.raised is None, done
    text = done.out + "".join(f"! {x}\n" for x in done.err.splitlines() if x.startswith("error"))
    if (page := folder / "page.html").exists():
        text = re.sub(r"(?s)<(style|script).*?</\1>", "", page.read_text())
        text = "\n".join(
            filter(None, (" ".join(x.split()) for x in html.unescape(re.sub(r"<[^>]+>", "\n", text)).splitlines()))
        )
        text += "\n" + "\n".join(re.findall(r"width:[\d.]+%", page.read_text())) + "\n"
        page.unlink()
    text = re.sub(r"\b\d+\.\d+ s\b|(?<=most CPU s).*", "_ s", text)
    text = re.sub(r'("seconds": )[\d.e-]+', r"\1_", text)
    text = re.sub(r"0\.1\.0[.\w]*", "VERSION", text)
    return "\n".join(x.rstrip() for x in text.splitlines()) + "\n"


def runs() -> dict[str, str]:
    """Return what is printed of made-up runs, in which operations took three times as long as planned."""
    from cases.measured import replayed, script_of

    from pipeplan.plan import Schedule
    from pipeplan.problem import Policy
    from pipeplan.report.tables.run import print_report
    from pipeplan.runtime.measure.report import DeviceMemory, DeviceState, ReadingTime, make_report

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
    )
    texts = {}
    for name, words in {
        "run": (script.plan, plain, False, False),
        "run-full": (script.plan, full, False, False, (other.plan, beside)),
        "run-json": (script.plan, plain, False, True),
        "run-evaluate": (script.plan, plain, True, False),
    }.items():
        with redirect_stdout(io.StringIO()) as told:
            print_report(*words)
        texts[name] = told.getvalue()
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
    tell(StepProgress(4, 4, 0.25, None, None, None, evaluation={"loss": 0.5, "accuracy": 0.75}))
    assert capsys.readouterr().err.splitlines() == [
        "update 1 of 4: loss 1.0000, 1.000 ms per microbatch",
        "update 4 of 4: loss 0.2500, gradient norm 2, 1.000 ms per microbatch",
        "update 4 of 4: on held-out data loss 0.5000, accuracy 0.7500",
    ]


RUNS = ("run", "run-full", "run-json", "run-evaluate")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_s_report_is_what_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("COLUMNS", "120")
    assert runs()[name] == (KEPT / f"{name}.txt").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    for name, text in runs().items():
        (KEPT / f"{name}.txt").write_text(text)
