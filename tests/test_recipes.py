"""What docs/recipes has to copy runs: the notebook, the scripts, and the commands in files for other systems."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cases.patience import SECONDS

from pipeplan.cli import group
from pipeplan.files.plans import plan_text
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Problem

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
JOBS = sorted(path.name for path in RECIPES.iterdir() if path.suffix in (".sbatch", ".yaml", ".yml"))
COMMAND = re.compile(r"^(?!\s*#).*?\bpipeplan ((?:run|plan|profile|report|estimate)\b.*)$", re.MULTILINE)


def test_the_notebook_runs_and_shows_what_it_promises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((RECIPES / "first_plan.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    names: dict[str, object] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            *before, last = re.split(r"\n(?=\S)", "".join(cell["source"]))  # a notebook shows the last expression
            exec("\n".join(before), names)
            shown.append(eval(last, names))
    found, periods, runs, page = shown
    assert "period " in found._repr_html_()
    assert found.gap >= 0
    assert list(periods.values()) == sorted(periods.values(), reverse=True)
    assert [run.schedule for run in runs] == ["pattern", "1f1b", "zbv"]
    assert page is not None
    assert "<canvas" in (tmp_path / "report.html").read_text()


def plan_file(folder, name, factor):
    """A plan of layers that take ``factor`` times as long as others'."""
    layers = (Layer(f"layer{i}", factor * 100, factor * 200, 4, 8, 16) for i in range(4))
    chain = Chain("even", tuple(layers), 8)
    (folder / name).write_text(plan_text(make_plan(Problem(chain, Platform.flat(2, 10**9)), "balance").plan))
    return str(folder / name)


@pytest.mark.parametrize(
    ("before", "after", "percent", "fails"), [(1, 2, 2, True), (2, 1, 0, False), (1, 2, 150, False)]
)
def test_a_plan_that_got_slower_fails_the_pull_request(before, after, percent, fails, tmp_path, monkeypatch, capsys):
    files = [plan_file(tmp_path, name, factor) for name, factor in (("before.json", before), ("after.json", after))]
    monkeypatch.setattr(sys, "argv", ["not_slower.py", *files, str(percent)])
    if fails:
        with pytest.raises(SystemExit, match=r"got slower by 100\.0%, more than the 2%"):
            runpy.run_path(str(RECIPES / "not_slower.py"))
    else:
        runpy.run_path(str(RECIPES / "not_slower.py"))
    assert "per sample before" in capsys.readouterr().out


@pytest.mark.parametrize("stops", [False, True])
def test_the_batch_script_starts_one_torchrun_on_every_node_and_queues_what_was_stopped(stops):
    done = subprocess.run(
        ["bash", str(RECIPES / "pipeplan.sbatch")],
        env={
            "PATH": f"{Path(__file__).parent / 'cases' / 'slurm'}:/usr/bin:/bin", "SLURM_JOB_ID": "31234",
            "SLURM_JOB_NODELIST": "node[2,10]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "STEPS": "7",
        }
        | ({"STOPPED": "error: stopped after update 5; its checkpoint is in /shared/run"} if stops else {}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "stopped" not in line]
    assert (done.returncode, lines[3:]) == ((1, ["requeue 31234"]) if stops else (0, []))
    options, first, second = lines[:3]
    assert options == "--kill-on-bad-exit=1"
    assert first == second.replace("--node-rank=1", "--node-rank=0")
    assert first.startswith("--nnodes=2 --nproc-per-node=4 --node-rank=0 --master-addr=node2 --master-port=21234 -m ")
    assert " --steps 7 --checkpoint /shared/run " in first


@pytest.mark.parametrize("recipe", JOBS)
def test_commands_in_recipes_are_those_that_there_are(recipe):
    """Every command is one, and takes the options that it is given."""
    text = re.sub(r"\s*\\\n\s*|\n {14}(?=-)", " ", (RECIPES / recipe).read_text())
    lines = COMMAND.findall(text)
    assert lines
    for line in lines:
        name, *words = shlex.split(line.rstrip("'").replace("$MACHINES", "--gpus 2x8 --gpu h100"))
        command = group.get_command(click.Context(group), name)
        context = command.make_context(name, list(words), resilient_parsing=True)
        assert context is not None
        options = {option for parameter in command.params for option in parameter.opts}
        hidden = {
            option for parameter in command.params if getattr(parameter, "hidden", False) for option in parameter.opts
        }
        assert {word for word in words if word.startswith("-")} <= options - hidden, line


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.iterdir() if path.is_file()))
def test_recipes_install_what_there_is_and_link_to_what_there_is(recipe):
    """Until there is a release, a checkout or a wheel; and no option that help doesn't list."""
    text = (RECIPES / recipe).read_text()
    installed = [
        words for line in re.findall(r"pip install (.*)", text) for words in line.split() if "pipeplan" in words
    ]
    assert [x for x in installed if not re.match(r"'?\./|wheels/", x)] == []
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [x for x in linked if not (RECIPES / x).exists()] == []


def test_the_image_copies_what_it_installs():
    lines = (RECIPES / "Containerfile").read_text().splitlines()
    assert {line.split()[0] for line in lines} <= {"#", "FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}
    copied = {words[-1] for line in lines if (words := line.split())[0] == "COPY"}
    (installed,) = re.findall(r"'\./([\w-]+)\[torch\]'", "\n".join(lines))
    assert installed in copied
    (command,) = [words.split() for words in re.findall(r"mymodel:1 (.*)", lines[1])]
    assert group.get_command(click.Context(group), command[0]).make_context(*command[:1], command[1:]) is not None


def test_the_batch_script_is_one_of_bash():
    subprocess.run(["bash", "-n", str(RECIPES / "pipeplan.sbatch")], check=True, timeout=SECONDS)


@pytest.mark.parametrize("recipe", ["kubernetes.yaml", "skypilot.yaml", "pull-request.yml"])
def test_recipes_are_yaml(recipe):
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((RECIPES / recipe).read_text()))
    assert all(isinstance(document, dict) for document in documents)
    assert len(documents) == (2 if recipe == "kubernetes.yaml" else 1)


def test_every_recipe_is_on_the_page():
    page = (RECIPES.parent / "recipes.md").read_text()
    assert [path.name for path in RECIPES.iterdir() if f"(recipes/{path.name})" not in page] == []
