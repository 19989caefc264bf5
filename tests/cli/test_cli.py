"""The commands: what they print, their exit codes, and one sentence for every kind of bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cases.even_profile import LAYERS, PROFILE
from cases.files import written
from cases.patience import SECONDS, without_progress
from conftest import Command

from pipeplan.cli import _escaped, _lacking, group, main

SMALL = ["--gpus", "2", "--mem", "1GB", "--bandwidth", "12GB/s"]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, PROFILE, "profile.json")


@pytest.fixture
def plan(tmp_path: Path, profile: str, pipeplan: Command) -> str:
    path = str(tmp_path / "plan.json")
    code, _, err = pipeplan("plan", profile, *SMALL, "--no-replicas", "-o", path)
    assert (code, err) == (0, "")
    return path


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_a_solver_that_fails_costs_candidates_and_not_the_plan(
    solver: str, profile: str, pipeplan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pulp

    from pipeplan.schedule.periodic import solvers

    def crash(*_: object) -> None:
        raise pulp.PulpSolverError("crashed")

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", crash)
    monkeypatch.setattr(solvers, "_in_a_thread", lambda model: None)  # so HiGHS is left without an answer
    asked = ["--weights", "stash", "--vertical-sync", "--split", "2,4,2", "--on", "0/1/0", "-O", f"solver={solver}"]
    code, out, err = pipeplan("plan", profile, *SMALL, *asked)
    assert (code, "period  " in out) == (0, True)
    assert err == "note: the integer program's solver failed on one candidate, so a better order may be missed\n"


def test_plan_json_equals_the_written_file_but_for_seconds(profile: str, tmp_path: Path, pipeplan: Command) -> None:
    target = tmp_path / "plan.json"
    code, out, _ = pipeplan("plan", profile, *SMALL, "--json", "-o", str(target))
    assert code == 0
    assert json.loads(out) == json.loads(target.read_text())
    code, piped, _ = pipeplan("plan", "-", *SMALL, "-o", "-", stdin=json.dumps(PROFILE))
    assert code == 0
    again, first = json.loads(piped), json.loads(out)
    assert again["provenance"].pop("seconds") >= 0
    first["provenance"].pop("seconds")
    assert again == first


def test_check_show_and_simulate_read_a_plan(plan: str, pipeplan: Command) -> None:
    code, out, _ = pipeplan("check", plan)
    assert code == 0
    assert out.startswith("valid: period 12.000 ms")
    verdict = json.loads(pipeplan("check", plan, "--json")[1])
    assert (verdict["valid"], verdict["violations"]) == (True, [])
    assert [(bound["class"], bound["checked"]) for bound in verdict["lower_bounds"]] == [
        ("contiguous", False),
        ("any", True),
    ]
    assert all(
        bound["checked"] for bound in json.loads(pipeplan("check", plan, "--bounds", "--json")[1])["lower_bounds"]
    )

    own = json.loads(pipeplan("simulate", plan, "--json")[1])
    assert verdict["delays"] == json.loads(Path(plan).read_text())["delays"] == own["delays"]

    code, out, _ = pipeplan("show", plan, "--width", "80")
    assert code == 0
    assert [line[:5] for line in out.splitlines()[-3:]] == ["GPU 0", "GPU 1", "link "]
    assert all(len(line) <= 80 for line in out.splitlines())
    assert len(json.loads(pipeplan("show", plan, "--json")[1])["rows"]) == 3

    code, out, _ = pipeplan("simulate", plan, "--microbatches", "40")
    assert code == 0
    assert "period   12.000 ms reached in the middle, 12.000 ms planned" in out
    figures = json.loads(pipeplan("simulate", plan, "--microbatches", "40", "--json")[1])
    assert figures["microbatches"] == 40
    assert figures["period_ns"] == figures["pattern_period_ns"] == 12 * 10**6
    for row in figures["devices"]:
        assert row["peak_bytes"] == row["predicted_peak_bytes"] <= row["memory_bytes"]
    code, out, _ = pipeplan("simulate", plan, "--microbatches", "3", "--text")
    assert out.splitlines()[1] == "device 1: 1F0 1B0 1F1 1B1 1F2 1B2"


def test_a_stated_configuration_is_evaluated_and_nothing_else(profile: str, tmp_path: Path, pipeplan: Command) -> None:
    target = str(tmp_path / "plan.json")
    code, out, err = pipeplan("plan", profile, *SMALL, "--split", "2,6", "--recompute", "0-1", "-o", target)
    assert (code, err) == (0, "")
    assert "0-1 l0..l1" in out
    assert "2-7 l2..l7" in out
    assert "class contiguous" not in out  # nobody has searched that
    assert "class any with replicas and checkpointing of segments" in out
    assert pipeplan("check", target)[0] == 0
    assert json.loads(Path(target).read_text())["provenance"]["options"] == {"split": "2,6", "recompute": "0-1"}
    assert "groups of stages, from the loss back: 1: 1; 2: 0" in pipeplan("show", target)[1]

    code, _, err = pipeplan("plan", profile, *SMALL, "--split", "2,5")
    assert (code, err) == (2, "error: --split: 2,5 are 7 layers, the network has 8\n")
    code, _, err = pipeplan("plan", profile, "--gpus", "2", "--mem", "1MB", "--split", "2,6")
    assert code == 1
    assert "stage 1 (layers 2 to 7 (l2 to l7)) on device 1 needs" in err
    for more in (["--algorithm", "contiguous"], ["--effort", "quick"], ["-O", "gap=5%"]):
        code, _, err = pipeplan("plan", profile, *SMALL, "--split", "2,6", *more)
        assert code == 2
        assert "--split searches nothing; leave out " in err
    assert "--on goes with --split" in pipeplan("plan", profile, *SMALL, "--on", "0/1")[2]


def test_algorithms_and_schema(pipeplan: Command) -> None:
    assert "contiguous" in pipeplan("list", "algorithms")[1]
    assert {row["name"] for row in json.loads(pipeplan("list", "algorithms", "--json")[1])} >= {
        "contiguous",
        "pipedream",
    }
    for name in ("profile", "platform", "plan", "trace", "accelerator"):
        assert "$defs" in json.loads(pipeplan("schema", name)[1])


def with_layer(**changes: Any) -> dict[str, Any]:
    return {**PROFILE, "layers": [*LAYERS[:3], {**LAYERS[3], **changes}]}


BAD_PROFILES = {
    "empty file": ("", "is empty"),
    "broken JSON": ('{"format": "pipeplan-profile/1", ', "truncated"),
    "NaN": (json.dumps(with_layer(forward_ns=float("nan"))), "malformed"),
    "negative time": (json.dumps(with_layer(forward_ns=-2)), "$.layers[3].forward_ns: -2 is negative"),
    "text for a number": (json.dumps(with_layer(forward_ns="2ms")), "$.layers[3].forward_ns"),
    "a fraction of a ns": (json.dumps(with_layer(backward_ns=1.5)), "$.layers[3].backward_ns"),
    "unknown key": (json.dumps(with_layer(colour="red")), "unknown field `colour` - at `$.layers[3]`"),
    "missing key": (json.dumps({k: v for k, v in PROFILE.items() if k != "input_bytes"}), "`input_bytes`"),
    "no layers": (json.dumps({**PROFILE, "layers": []}), "no layers"),
    "wrong format": (json.dumps({**PROFILE, "format": "pipeplan-profile/9"}), "$.format"),
    "an edge backwards": (json.dumps({**PROFILE, "edges": [[2, 1]]}), "edges[0]: [2, 1]"),
    "an edge to nowhere": (json.dumps({**PROFILE, "edges": [[2, 99]]}), "there are 8"),
    "no time at all": (
        json.dumps({**PROFILE, "layers": [{**layer, "forward_ns": 0, "backward_ns": 0} for layer in LAYERS]}),
        "nothing to plan",
    ),
    "a graph with a broken line": ("node1 -- Conv -- forward_compute_time=x\n", "line 1"),
    "a list": ("[1, 2]", "expected `object`, got `array`"),
}


@pytest.mark.parametrize(("text", "sentence"), BAD_PROFILES.values(), ids=BAD_PROFILES)
def test_bad_profiles_end_in_one_sentence_and_exit_2(
    text: str, sentence: str, tmp_path: Path, pipeplan: Command
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    code, out, err = pipeplan("plan", str(path), *SMALL)
    assert code == 2
    assert out == ""
    assert sentence.lower() in err.lower()
    assert "bad.json" in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


BAD_OPTIONS = {
    "no platform": ([], "--gpus, and --mem or --gpu, or --platform"),
    "no memory": (["--gpus", "2"], "the profile was measured on made up"),
    "no GPUs": (["--gpus", "0", "--mem", "1GB"], "'0' isn't a GPU count: write 8"),
    "memory without unit": (["--gpus", "2", "--mem", "16"], "'16' has no unit; write 16GB or 16GiB"),
    "memory in seconds": (["--gpus", "2", "--mem", "16s"], "'s' in '16s' is not a known unit"),
    "negative memory": (["--gpus", "2", "--mem", "-1GB"], "-1GB"),
    "NaN memory": (["--gpus", "2", "--mem", "nanGB"], "nanGB"),
    "no bandwidth": ([*SMALL, "--bandwidth", "0GB/s"], "must be positive"),
    "bandwidth in bytes": ([*SMALL, "--bandwidth", "12GB"], "write 12GB/s or 10Gbps"),
    "latency without unit": ([*SMALL, "--latency", "5"], "'5' has no unit"),
    "years of latency": ([*SMALL, "--latency", "9e8s"], "--latency: '9e8s' is longer than a message takes (at most"),
    "years of overhead": ([*SMALL, "--overhead", "9e8s"], "--overhead: '9e8s' is longer than a message takes"),
    "unknown algorithm": ([*SMALL, "--algorithm", "magic"], "'magic' is not one of"),
    "an option of another algorithm": ([*SMALL, "-O", "straight=true"], "-O straight is not an option of --algorithm"),
    "no such profile": ([*SMALL, "--platform", "x.json"], "--platform already says"),
}


@pytest.mark.parametrize(("options", "sentence"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_exit_2(options: list[str], sentence: str, profile: str, pipeplan: Command) -> None:
    code, out, err = pipeplan("plan", profile, *options)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert "Traceback" not in err


PLATFORM: dict[str, Any] = {"memory": "1GB", "levels": [{"count": 2, "bandwidth": "12GB/s"}]}
BAD_PLATFORMS = {
    "no levels": ({**PLATFORM, "levels": []}, "$.levels"),
    "a bare number": ({**PLATFORM, "memory": 16}, "$.memory"),
    "no unit": ({**PLATFORM, "memory": "16"}, "$.memory: '16' has no unit"),
    "bandwidth of 0": ({**PLATFORM, "levels": [{"count": 2, "bandwidth": "0GB/s"}]}, "$.levels[0].bandwidth"),
    "no devices": ({**PLATFORM, "levels": [{"count": 0, "bandwidth": "1GB/s"}]}, "$.levels[0].count: 0"),
    "no memory": ({"levels": PLATFORM["levels"]}, "device 0 has no memory"),
    "too few devices": ({**PLATFORM, "devices": [{}]}, "lists 1 devices"),
    "speed 0": ({**PLATFORM, "devices": [{"speed": 0}, {}]}, "$.devices[0].speed: 0"),
    "unknown key": ({**PLATFORM, "colour": "red"}, "unknown field `colour`"),
}


@pytest.mark.parametrize(("form", "sentence"), BAD_PLATFORMS.values(), ids=BAD_PLATFORMS)
def test_bad_platforms_exit_2(
    form: dict[str, Any], sentence: str, profile: str, tmp_path: Path, pipeplan: Command
) -> None:
    path = tmp_path / "platform.json"
    path.write_text(json.dumps(form))
    code, _, err = pipeplan("plan", profile, "--platform", str(path))
    assert code == 2
    assert sentence in err
    assert err.count("\n") == 1


def edited(plan: str, edit: Any) -> None:
    form = json.loads(Path(plan).read_text())
    edit(form)
    Path(plan).write_text(json.dumps(form))


def test_a_plan_edited_by_hand_is_refused_with_the_field(plan: str, pipeplan: Command) -> None:
    def smaller_peak(form: dict[str, Any]) -> None:
        form["devices"][0]["peak_bytes"] -= 1

    edited(plan, smaller_peak)
    for command in ("check", "show", "simulate"):
        code, out, err = pipeplan(command, plan)
        assert (code, out) == (1, "")
        assert "devices[0].peak_bytes is" in err
    code, out, _ = pipeplan("check", plan, "--json")
    assert code == 1
    assert json.loads(out)["valid"] is False


def test_what_an_output_lacks_is_escaped_and_what_else_is_lacking_is_a_traceback(monkeypatch) -> None:
    assert _escaped(UnicodeEncodeError("ascii", "a\u00e9\u20acb", 1, 3, "no")) == ("\\u00e9\\u20ac", 3)
    monkeypatch.setattr(group, "main", lambda **_: exec("import pipeplan.nothing"))
    with pytest.raises(ImportError, match="nothing"):
        main()


def test_a_closed_pipe_prints_no_traceback(profile: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m pipeplan plan {profile} --gpus 2 --mem 1GB --json | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "Traceback" not in done.stderr


def test_an_interrupt_exits_130_without_a_traceback(profile: str, tmp_path: Path) -> None:
    fifo = tmp_path / "never.json"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from pipeplan.cli import main; print('up', flush=True); main()",
            "plan",
            str(fifo),
            *SMALL,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    writer = os.open(fifo, os.O_WRONLY)  # returns once the command has opened the pipe and waits for the profile
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    os.close(writer)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_search_that_takes_more_memory_than_there_is_says_so(pipeplan, profile, monkeypatch):
    def exhausted(*_, **__):
        raise MemoryError

    for module in ("least_late", "what_if.alternatives", "what_if.target"):  # which take it by name, once
        import_module(f"pipeplan.planner.{module}")
    monkeypatch.setattr("pipeplan.planner.plan.make_plan", exhausted)
    code, out, err = pipeplan("plan", profile, *SMALL)
    assert (code, out) == (1, "")
    assert err.endswith("error: this takes more memory than there is; --granularity, or fewer GPUs, take less\n")


@pytest.mark.parametrize(
    ("lacking", "arguments", "extra"),
    [
        ("torch", "profile zoo:gpt-tiny --microbatch 8", "torch"),
        ("matplotlib", "show plan.json -o picture.png", "plots"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_what_brings_it(
    lacking: str, arguments: str, extra: str, plan: str
) -> None:
    code = f"import sys\nsys.modules[{lacking!r}] = None\nfrom pipeplan.__main__ import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], cwd=Path(plan).parent, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert without_progress(done.stderr) == f"error: this needs {lacking}: pip install 'pipeplan[{extra}]'\n"


@pytest.mark.parametrize("command", ["show", "simulate", "report", "check"])
def test_what_draws_no_picture_needs_no_extra(command: str, plan: str) -> None:
    without = "import sys\nsys.modules.update(dict.fromkeys(('matplotlib', 'highspy', 'tensorboard', 'torch')))\n"
    code = f"{without}from pipeplan.__main__ import main\nmain()"
    arguments = [command, plan, *(["-o", "r.html"] if command == "report" else [])]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=Path(plan).parent, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_torch_without_what_others_have_is_named() -> None:
    error = ImportError("cannot import name 'FakeTensor' from 'torch._x'", name="torch._x")
    sentence = _lacking(error) or ""
    assert sentence.startswith("torch ")
    assert sentence.endswith("FakeTensor' from 'torch._x'; pip install 'pipeplan[torch]' brings one")
    assert _lacking(ImportError("no", name="numpy")) is None


def test_a_file_of_another_kind_and_a_mistyped_command_say_what_to_type(
    profile: str, plan: str, pipeplan: Command
) -> None:
    sentence = f"error: {profile}: this is a profile; pipeplan plan makes a plan of it\n"
    assert pipeplan("check", profile) == (2, "", sentence)
    code, _, err = pipeplan("plan", plan, *SMALL)
    assert code == 2
    assert err.startswith(f"error: {plan}: this is a plan, with its profile; pipeplan check, ")
    code, _, err = pipeplan("simulat", plan)
    assert (code, err.splitlines()[-1]) == (2, "Error: No such command 'simulat'. Did you mean simulate?")
    for said, meant in (("--data-parallel", "--replicas"), ("--tensor-model-parallel-size", "--tensor")):
        code, _, err = pipeplan("plan", "p.json", said, "4")
        assert (code, err.splitlines()[-1]) == (2, f"Error: No such option '{said}'. Did you mean '{meant}'?")


def test_days_and_dollars_follow_from_the_period_and_all_gpus(profile: str, pipeplan: Command) -> None:
    asked = ("--tokens", "8.64e12/1000", "--price", "2.5")
    code, out, _ = pipeplan("plan", profile, *SMALL, *asked)
    period, each = float(out.split("period ")[1].split()[0]), PROFILE["microbatch"]
    days = 8.64e9 * period / 1000 / each / 86400
    found = out.splitlines()[-1]
    assert (code, found.split()[0]) == (0, "training")
    assert float(found.split()[1]) == pytest.approx(days, rel=0.01, abs=0.06)
    dollars = float(found.split("$")[1].split()[0].replace(",", ""))
    assert dollars == pytest.approx(days * 24 * 2 * 2.5, rel=0.01), "of both GPUs"
    assert "for 8,640,000,000 samples" in found
    code, out, _ = pipeplan("compare", profile, "--gpus", "1,2", "--mem", "1GB", "--algorithms", "balance", *asked)
    assert code == 0
    assert out.count(" days and $") == 2
    assert "of 8,640,000,000 samples: 1 GPU of 1 GB 600.0 days" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--price", "2"), "--price: say how long the training is, by --samples or --tokens"),
        (("--samples", "1e6", "--price", "0"), "--price: '0' is not a positive number up to 1e18, such as 2.5"),
        (("--tokens", "1e12"), "--tokens: '1e12' doesn't say how many tokens a sample has, such as 15e12/8192"),
        (("--tokens", "1e12/many"), "--tokens: 'many' is not a positive whole number up to 1e18, such as 100e6"),
        (("--tokens", "9/3", "--samples", "3"), "--samples and --tokens both say how long the training is"),
    ],
)
def test_what_says_no_training_is_refused(
    options: tuple[str, ...], sentence: str, profile: str, pipeplan: Command
) -> None:
    code, out, err = pipeplan("plan", profile, *SMALL, *options)
    assert (code, out) == (2, "")
    assert sentence in err
