"""Help under headings, one meaning for each option's name, lists, completion, and what the doctor finds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args

import click
import pytest
from cases.patience import SECONDS, without_progress
from conftest import Command

from pipeplan import choices
from pipeplan.check.targets import TARGETS
from pipeplan.cli import COMMANDS, group
from pipeplan.cli.showing import FIRST, GROUPS, OURS, OWN, GroupedCommand
from pipeplan.errors import PipeplanError
from pipeplan.files.frameworks import WRITERS
from pipeplan.partition import ALGORITHMS
from pipeplan.schedule.kinds import KINDS
from scripts import make_cli_docs

CONTEXT = click.Context(group, info_name="pipeplan", **group.context_settings)
FOUND = {name: group.get_command(CONTEXT, name) for name in COMMANDS}
OPTIONS = [
    (name, option)
    for name, command in FOUND.items()
    for option in command.params
    if isinstance(option, click.Option) and not option.hidden
]
DIFFER = {  # option -> why it isn't the same everywhere
    "--gpus": "compare takes several numbers",
    "--mem": "compare takes several",
    "--schedule": "plans have some, runs one other, and simulations and judgements read them from files",
    "--optimizer": "profiles and plans know what state it has, runs are by torch's name",
    "--microbatch": "grids choose among several",
    "--batch": "grids need it",
    "--zero": "",
    "--output": "report must have a file",
    "--links": "one draws them by default",
    "--split": "plans state stages, orders have weight gradients as passes of their own",
    "--device": "",
    "--limit": "",
    "--model": "",
    "--bandwidth": "",
    "--trace": "",
}


def shape(option: click.Option) -> tuple[object, ...]:
    choices = tuple(option.type.choices) if isinstance(option.type, click.Choice) else None
    return option.metavar, option.is_flag, option.multiple, choices


def test_an_options_name_means_one_thing_in_all_commands() -> None:
    shapes = defaultdict(set)
    for _, option in OPTIONS:
        shapes[option.opts[-1]].add(shape(option))
    assert {name for name, found in shapes.items() if len(found) > 1} <= set(DIFFER)


def test_all_commands_have_headings_that_name_what_there_is() -> None:
    names = {name.lstrip("-") for _, option in OPTIONS for name in option.opts}
    assert [name for name, command in FOUND.items() if not isinstance(command, GroupedCommand)] == []
    listed = [name for text in GROUPS.values() for name in text.split()]
    assert len(listed) == len(set(listed))
    assert {*listed, *" ".join(OURS.values()).split()} - names == {"help", "help-all"}
    for command, first in FIRST.items():
        own = {x.lstrip("-") for name, option in OPTIONS if name == command for x in option.opts}
        assert set(first.split()) <= own, command
    assert set(OWN.values()) <= set(GROUPS)
    assert {*OWN, *OURS} <= set(COMMANDS)


def test_every_command_has_help_with_an_example_and_at_once() -> None:
    """Nothing is loaded for it that computes: neither libraries nor the nouns that need them."""
    code = f"""
import sys
from pipeplan.cli import group
for name in {list(COMMANDS)}:
    group.main([name, "--help"], "pipeplan", standalone_mode=False)
loaded = {{"numpy", "torch", "pulp", "networkx", "msgspec", "rich", "pipeplan.problem"}} & set(sys.modules)
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    for name in COMMANDS:
        assert f"Usage: pipeplan {name} " in done.stdout
        assert re.search(rf"Usage: pipeplan {name} .*\n\n  pipeplan {name}\b.*\n  pipeplan ", done.stdout), name


def test_help_takes_no_time() -> None:
    """Beside an interpreter that imports click: it is 0.05 s of CPU, sometimes thrice as much on a busy machine."""
    code = """
import click, sys, time
from pipeplan.cli import group
began = time.process_time()
group.main(["plan", "--help"], "pipeplan", standalone_mode=False)
print(time.process_time() - began, file=sys.stderr)
"""

    def took() -> float:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True)
        return float(without_progress(done.stderr))

    assert any(took() < 0.15 for _ in range(9))


def test_help_shows_a_dozen_options_and_help_all_the_rest(pipeplan: Command) -> None:
    def listed(*arguments: str) -> set[str]:
        code, out, err = pipeplan(*arguments)
        assert (code, err) == (0, "")
        return set(re.findall(r"^  (?:-\w, )?--([a-z-]+)", out, re.MULTILINE))

    few, every = listed("plan", "--help"), listed("plan", "--help-all")
    assert len(few) < 18
    assert few - every == {"help-all"}
    assert {"recompute", "replicas", "schedule", "option"} <= every - few
    assert sum(len(listed(name, "--help")) for name in COMMANDS) <= 250


def test_choices_are_what_has_a_row() -> None:
    assert get_args(choices.ScheduleKind) == tuple(KINDS)
    assert get_args(choices.AlgorithmName) == tuple(ALGORITHMS)
    assert get_args(choices.TargetName) == tuple(TARGETS)
    assert tuple(WRITERS) == choices.FORMS


def test_help_has_headings_defaults_and_what_is_required(pipeplan: Command) -> None:
    out = pipeplan("plan", "--help-all")[1]
    places = [out.index(f"\n{title}:\n") for title in ("Model", "Platform", "Training", "Search", "Output")]
    assert places == sorted(places)
    assert out.index("Platform:") < out.index("--gpus N|N") < out.index("Training:")
    assert "INTEGER RANGE" not in out
    assert "<=x<=1000000" not in out
    assert "[default: 0; 0<=x<=3]" in pipeplan("grid", "--help-all")[1]
    assert "[required]" in pipeplan("report", "--help")[1]
    assert "[default: 0]" in pipeplan("simulate", "--help-all")[1]  # of --seed
    assert "Options:\n" in pipeplan("list", "--help")[1]  # few need no headings


def test_what_has_a_name_is_listed(pipeplan: Command) -> None:
    known = {"gpus": "h100", "models": "zoo:llama3-8b", "schedules": "zbv", "algorithms": "pipedream"}
    for what, name in known.items():
        code, out, _ = pipeplan("list", what)
        assert (code, f"\n{name} " in out) == (0, True)
        rows = json.loads(pipeplan("list", what, "--json")[1])
        assert name in {row["name"] for row in rows}
    assert "-O charge=full|tight|paper" in pipeplan("list", "algorithms")[1]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("plan zoo:gpt2-x", ["zoo:gpt2-xl"]),
        ("plan p.json --gpu h1", ["h100", "h100-pcie"]),
        ("plan p.json --algorithm madp", ["madpipe", "madpipe-paper"]),
        ("plan p.json -O charge=t", ["charge=tight"]),
        ("simulate p.json --schedule zb", ["zb1p", "zb2p", "zbv"]),
        ("compare p.json --algorithms auto,gp", ["auto,gpipe"]),
        ("profile zoo:llama3-8", ["zoo:llama3-8b"]),
        ("estimate zoo:llama-7", ["zoo:llama-7b"]),
        ("list sch", ["schedules"]),
        ("doc", ["doctor"]),
        ("plan my", ["my"]),  # a file, which the shell looks for itself
    ],
)
def test_a_shell_completes_names(words: str, wanted: list[str]) -> None:
    from click.shell_completion import ShellComplete

    *before, last = words.split()
    found = ShellComplete(group, {}, "pipeplan", "_PIPEPLAN_COMPLETE").get_completions(before, last)
    assert [item.value for item in found] == wanted


def test_completion_is_installed_once_by_one_command(tmp_path, monkeypatch, pipeplan: Command) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZDOTDIR", raising=False)
    monkeypatch.setenv("SHELL", "/bin/zsh")
    assert pipeplan("completion", "--install")[0] == 0  # where there is no such file
    assert (tmp_path / ".zshrc").read_text().startswith("eval")
    (tmp_path / ".zshrc").write_text("autoload -U compinit; compinit")
    for _ in range(2):
        assert pipeplan("completion", "--install")[0] == 0
    assert (tmp_path / ".zshrc").read_text().count("\neval") == 1
    for shell, text in {"bash": "COMP_WORDBREAKS//:", "fish": "complete --no-files --command pipeplan"}.items():
        code, out, _ = pipeplan("completion", shell, "--install")
        assert code == 0
        assert text in Path(out.split()[2].rstrip(";")).read_text()
        assert text in pipeplan("completion", shell)[1]
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "name one" in pipeplan("completion")[2]


def test_the_doctor_says_what_there_is_and_what_lacks(monkeypatch, pipeplan: Command) -> None:
    monkeypatch.setattr("pipeplan.runtime.surroundings._driven", list)
    torch = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    code, out, err = pipeplan("doctor")
    assert (code, err) == (0, "")
    assert "ok  CBC" in out
    monkeypatch.setattr("pipeplan.cli.doctor.version", missing)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = pipeplan("doctor", "--json")
    found = {row["name"]: row for row in json.loads(out)["findings"]}
    assert (code, json.loads(out)["good"], out) == (1, False, json.dumps(json.loads(out), indent=1) + "\n")
    assert (found["numpy"]["state"], found["pipeplan"]["state"]) == ("broken", "good")
    assert found["torch"] == {
        "name": "torch",
        "state": "absent",
        "told": "not installed: profile and run need it",
        "help": "pip install 'pipeplan[torch]'",
    }


def test_the_doctor_says_what_does_not_work_and_what_helps(monkeypatch) -> None:
    from pipeplan.cli import doctor
    from pipeplan.schedule.periodic import solvers

    def broken(name: str) -> None:
        raise PipeplanError(f"no {name}")

    def told() -> list[list[str]]:
        found = [x for x in doctor.examined() if x.name not in ("pipeplan", *[*doctor.NEEDED][1:])]
        return [[x.name, x.state, x.told.partition(",")[0], x.help] for x in found]

    monkeypatch.setattr(doctor, "findings", list)
    monkeypatch.setattr(doctor, "version", lambda name: f"{name} 1")
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "4.0")
    monkeypatch.setattr(doctor, "OLDEST", sys.version_info[:2])
    monkeypatch.setattr(solvers, "refuse_lacking", lambda name: None)
    good = [
        ["Python", "good", "4.0", ""], ["click", "good", "click 1", ""], ["CBC", "good", "runs: -O solver=cbc", ""],
        ["HiGHS", "good", "highspy 1", ""], ["transformers", "good", "transformers 1", ""],
        ["matplotlib", "good", "matplotlib 1", ""],
    ]  # fmt: skip
    assert told() == good
    monkeypatch.setattr(doctor, "OLDEST", (4, 1))
    monkeypatch.setattr(solvers, "refuse_lacking", broken)
    assert [x for x in told() if x not in good] == [
        ["Python", "broken", "4.0", "at least 4.1 is needed"],
        ["CBC", "broken", "no cbc", "-O solver=highs"],
        ["HiGHS", "broken", "no highs", "pip install --force-reinstall highspy"],
    ]
    monkeypatch.setattr(doctor, "version", missing)
    assert [x for x in told() if x[0] not in ("Python", "CBC")] == [
        ["click", "broken", "lacks", "pip install click"],
        ["HiGHS", "absent", "not installed: -O solver=highs needs it", "pip install 'pipeplan[highs]'"],
        ["transformers", "absent", "not installed: models named hf:CONFIG need it", "pip install 'pipeplan[models]'"],
        ["matplotlib", "absent", "not installed: pictures", "pip install 'pipeplan[plots]'"],
    ]


def test_the_doctor_looks_at_gpus_nccl_and_links(monkeypatch) -> None:
    from pipeplan.runtime.surroundings import findings

    def found(torch, driven=()):
        monkeypatch.setattr("pipeplan.runtime.surroundings._driven", lambda: list(driven))
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
        return {x.name: (x.state, x.told) for x in findings()}

    some = found(fake_torch(gpus=3, apart={(0, 2), (2, 0)}), ["H100"] * 3)
    assert some["GPU 2"] == ("good", "H100, 80.0 GB, compute 9.0")
    assert some["NCCL"] == ("good", "2.27.3")
    assert some["links"][1] == "2 of 6 pairs go through host memory, such as 0 to 2"
    assert found(fake_torch(gpus=2))["links"][1] == "all 2 pairs of GPUs reach each other directly"
    assert found(fake_torch(gpus=1, nccl=False))["NCCL"][0] == "broken"
    assert found(fake_torch(cuda=None), ["H100"])["GPUs"] == (
        "broken",
        "the driver has 1 (H100), torch is a build for CPUs alone",
    )


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


def fake_torch(gpus=0, apart=(), nccl=True, cuda="12.8"):
    """What the doctor asks of torch, on a machine with GPUs."""
    torch = ModuleType("torch")
    torch.__version__ = "2.13.0"
    torch.version = SimpleNamespace(cuda=cuda)
    torch.distributed = ModuleType("torch.distributed")
    torch.distributed.is_available = torch.distributed.is_gloo_available = lambda: True
    torch.distributed.is_nccl_available = lambda: nccl
    torch.cuda = SimpleNamespace(
        is_available=lambda: gpus > 0,
        device_count=lambda: gpus,
        get_device_properties=lambda i: SimpleNamespace(name="H100", total_memory=80 * 10**9, major=9, minor=0),
        can_device_access_peer=lambda a, b: (a, b) not in apart,
        nccl=SimpleNamespace(version=lambda: (2, 27, 3)),
    )
    return torch


def test_the_page_of_the_command_line_is_what_help_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    assert page.read_text() == make_cli_docs.page(), "python scripts/make_cli_docs.py"
