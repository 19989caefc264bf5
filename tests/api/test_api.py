"""The Python API: one truth with the command line, one line each in words, and the same sentences where it refuses."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import click
import pytest
from cases.even_profile import PROFILE
from cases.files import written

import pipeplan as pp
from pipeplan.api.asked import Asked, Comparing, Grids, Planning, defaults, words
from pipeplan.check.validate import check
from pipeplan.cli.options import asking
from pipeplan.errors import InvalidPlan
from pipeplan.problem import CHANGED, Platform

GIVEN = {"gpus": 2, "mem": "1GB", "bandwidth": "12GB/s"}
SMALL = ["--gpus", "2", "--mem", "1GB", "--bandwidth", "12GB/s"]


@pytest.fixture
def path(tmp_path):
    return written(tmp_path, PROFILE, "profile.json")


def options_of(question):
    @asking(question)
    @click.command()
    def command(**_):
        pass

    return {x.name: x for x in command.params}


@pytest.mark.parametrize("question", [Asked, Planning, Grids, Comparing])
def test_options_are_made_from_the_words_of_a_question(question):
    """All of them, with the same defaults; what tunes a search stands under -O."""
    options = options_of(question)
    knobs = {name for name, said in words(question).items() if said.knob}
    asked = set(words(question)) - knobs - {"time_limit", "options"}
    assert set(options) == asked | ({"knobs"} if knobs else set())
    for name in asked:
        found = options[name].to_info_dict()["default"]
        assert (found or None) == (defaults(question)[name] or None), name
    assert all(f"{words(question)[name].option}=" in options["knobs"].help for name in knobs)


def test_help_shows_every_keyword_the_machine_first(path):
    keywords = list(inspect.signature(pp.plan).parameters)
    assert keywords[:5] == ["profile", "gpus", "gpu", "mem", "batch"]
    assert "\n\nno_replicas: One GPU per stage.\n\n" in pp.plan.__doc__
    assert set(keywords) == {"profile", "progress", "status", "on_plan", *words(Planning)}
    assert {"pipelines", "batch"} <= set(inspect.signature(pp.grid).parameters)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gpu_count'; there are gpus, gpu, mem"):
        pp.plan(path, gpu_count=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'weights'"):
        pp.grid(path, gpus=2, mem="1GB", batch=16, weights="2bw")


def test_a_model_that_trains_by_buffers_that_forwards_change_has_no_replicas(tmp_path, pipeplan):
    path = written(tmp_path, {**PROFILE, "changed": "norm.weight_u"}, "changed.json")
    why = CHANGED.format(name="even", buffer="norm.weight_u")
    code, out, err = pipeplan("plan", path, *SMALL, "-v")
    assert (code, f"no replicas: {why}" in " ".join((out + err).split())) == (0, True), out + err
    assert why not in "".join(pipeplan("plan", path, *SMALL, "-v", "--no-replicas")[1:])
    refused = {
        "plan --algorithm data-parallel": f"--algorithm data-parallel: {why}",
        "plan --zero 1 --weights flush": f"--zero 1: {why}",
        "plan --split 8 --replicas 2": f"stage 0 has 2 GPUs; {why}",
        "grid --batch 64 --data-parallel 2": f"--data-parallel 2: {why}",
    }
    for line, sentence in refused.items():
        command, *options = line.split()
        code, _, err = pipeplan(command, path, *SMALL, *options)
        assert (code, sentence in err) == (2, True), (line, err)
    assert pipeplan("grid", path, *SMALL, "--batch", "64")[0] == 0
    plain = pp.plan(written(tmp_path, PROFILE, "plain.json"), **GIVEN, algorithm="data-parallel").plan
    with pytest.raises(InvalidPlan, match=re.escape(f"{why}; plan with --no-replicas")):
        check(replace(plain, chain=replace(plain.chain, changed="norm.weight_u")))


def test_the_commands_plan_is_the_apis(path, tmp_path, pipeplan, capsys):
    target = str(tmp_path / "plan.json")
    assert pipeplan("plan", path, *SMALL, "--no-replicas", "-o", target)[0] == 0
    found = pp.plan(path, **GIVEN, no_replicas=True)
    found.save(tmp_path / "mine.json")
    texts = [json.loads(Path(x).read_text()) for x in (target, tmp_path / "mine.json")]
    for text in texts:
        text["provenance"].pop("seconds")
    assert texts[0] == texts[1]
    assert pp.read_plan(target).stages == found.stages
    found.show()
    assert capsys.readouterr().out == pipeplan("plan", path, *SMALL, "--no-replicas")[1]


def test_a_plan_has_its_figures_stages_runs_and_files(path, tmp_path):
    found = pp.plan(path, **GIVEN, split="2,6", recompute="0-1", accumulate=4)
    assert found.period_ns == found.evaluation.period_ns == round(found.period * 1e9)
    assert found.bound_ns <= found.period_ns
    assert found.gap == pytest.approx(found.period_ns / found.bound_ns - 1)
    assert found.samples_per_second == pytest.approx(4 / found.period)
    first, second = found.stages
    assert (first.layers, first.gpus, first.recomputed) == (("l0", "l1"), (0,), ("l0", "l1"))
    assert (second.forward_ns, second.layers[-1], second.memory_bytes) == (6 * 10**6, "l7", 10**9)
    run = found.simulate("gpipe", 8)
    assert (run.schedule, run.timeline.program.microbatches) == ("gpipe", 8)
    runs = found.schedules("gpipe", "1f1b", microbatches=8)
    assert {run.schedule for run in runs} == {"gpipe", "1f1b"}
    assert runs[0].per_microbatch_ns <= runs[1].per_microbatch_ns
    assert len(found.simulate(jitter=0.1, runs=3, seed=1).jitter_ns) == 3
    assert found.report(tmp_path / "report.html", microbatches=4) == 4
    assert "<svg" in (tmp_path / "report.html").read_text()
    text = found.export("torch-csv", tmp_path / "plan.csv", schedule="1f1b", microbatches=4)
    assert (tmp_path / "plan.csv").read_text() == text
    assert "def " in (tmp_path / "plan.py").read_text()


def test_ranks_have_their_layers_and_their_order(path):
    """As a dry run prints it: what a training loop of one's own goes through."""
    found = pp.plan(path, **GIVEN, split="2,6", weights="flush", accumulate=2)
    first, second = found.ranks()
    assert (first.rank, first.gpu, first.layers) == (0, 0, {0: ("l0", "l1")})
    assert list(second.layers) == [1]
    kinds = [type(x).__name__ for x in first.program if getattr(x, "microbatch", 0) == 0]
    assert kinds == ["Forward", "Send", "Receive", "Backward", "Update"]
    assert [x.peer for x in second.program if hasattr(x, "peer")] == [0] * 4


def test_an_order_is_found_and_read_as_a_schedule(path, tmp_path):
    plan = pp.plan(path, **GIVEN, split="4,4", weights="flush", accumulate=4)
    for given in ({"plan": plan}, {"gpus": 2, "placement": "straight", "times": (20, 24, 16)}):
        found = pp.synthesize(**given, microbatches=4, moves=100)
        assert found.figures()["makespan_ns"] >= found.figures()["lower_bound_ns"] > 0
    found = pp.synthesize(plan, moves=100, split=False)
    found.save(tmp_path / "order.csv")
    assert plan.simulate(str(tmp_path / "order.csv")).makespan_ns == found.figures()["makespan_ns"]
    with pytest.raises(pp.BadInput, match=r"^gpus: PLAN sets it already; leave it out"):
        pp.synthesize(plan, gpus=2)


def test_what_is_run_today_is_judged(path, tmp_path):
    script = "--num-layers 6 --pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 16"
    (tmp_path / "train.sh").write_text(script)
    with pytest.raises(pp.BadInput, match=r"^framework: arguments are read of megatron, torchtitan"):
        pp.import_plan(path, tmp_path / "train.sh", framework="torch", gpus=2, mem="1GB")


def test_dash_o_says_what_tunes_a_search_and_what_an_algorithm_has(path, pipeplan):
    given = ["plan", path, *SMALL, "--algorithm", "madpipe", "--json"]
    text = json.loads(pipeplan(*given, "-O", "split=true", "-O", "charge=tight", "-O", "solver=cbc")[1])
    assert text["provenance"]["options"] == {"split": True, "charge": "tight"}
    for knob, sentence in (
        ("straight", "'straight' is not of the form NAME=VALUE"),
        ("solver=glpk", "-O solver: 'glpk' is not one of"),
        ("jobs=0", "-O jobs: 0 is not in the range"),
    ):
        assert sentence in " ".join(pipeplan(*given, "-O", knob)[2].split())


def test_everything_reads_as_one_line_and_as_html(path):
    found = pp.plan(path, **GIVEN, split="4*2")
    compared = pp.compare(path, gpus="1,2", mem="1GB", algorithms=["balance", "gpipe"])
    for thing in (found, found.simulate(), pp.read_profile(path), compared):
        assert "\n" not in str(thing)
        assert len(str(thing)) < 130
    assert "<script>" not in pp.read_profile(path)._repr_html_()
    assert "stage  layers" in found._repr_html_()
    assert "canvas" in found._repr_html_().partition("<iframe srcdoc=")[2]
    assert [row["layers"][0] for row in found.table()] == ["l0", "l4"]
    assert found.row()["period_ns"] == found.period_ns
    assert [(row["gpus"], row["algorithm"]) for row in compared.table()] == [
        (count, name) for count in (1, 2) for name in ("balance", "gpipe")
    ]
    assert [row.gpus for row in compared.rows] == [1, 2]


def test_what_names_a_model_is_no_file_and_no_shipped_profile(path, tmp_path, monkeypatch):
    from pipeplan.api.given.profiles import is_name

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").write_text("{}")
    names = ["zoo:gpt-tiny", "hf:LlamaForCausalLM", "mymodel:build", "package.mymodel:build"]
    assert [name for name in (*names, path, "a:b", "example:resnet50", "-", "C:/x.json") if is_name(name)] == names


def test_a_grid_is_planned_and_platforms_are_taken_as_nouns(path):
    found = pp.grid(path, gpus=2, mem="1GB", batch=16, microbatches=[4])
    assert "grid" in found.plan.provenance.options
    same = pp.estimate(path, gpus=2, mem="1GB", batch=16, microbatches=[4], optimizer="sgd", precision="fp32")
    assert same.row() == found.row()
    for odd in (None, "x", b"x"):
        with pytest.raises(pp.BadInput, match=r"^profiles: .* is not a list"):
            pp.grid(path, gpus=2, mem="1GB", batch=16, profiles=odd)
    flat = pp.plan(path, platform=Platform.flat(2, 10**9), split="4,4")
    assert flat.period_ns == pp.plan(path, **GIVEN, split="4,4").period_ns
    by_number = pp.plan(pp.read_profile(path).chain, gpus=2, mem=10**9, bandwidth=12 * 10**9, split="4,4")
    assert by_number.period_ns == flat.period_ns


@pytest.mark.parametrize(
    ("given", "more", "sentence"),
    [
        ({"gpus": 2}, [], "mem is missing: say the memory of a GPU"),
        ({**GIVEN, "zero": 1, "no_replicas": True}, ["--zero", "1", "--no-replicas"], "there is nobody to share with"),
        ({**GIVEN, "for_": "torch", "limit": 2}, ["--for", "torch", "--limit", "2"], "for_ torch drains"),
        ({**GIVEN, "gap": 0.01, "algorithm": "balance"}, ["-O", "gap=1%", "--algorithm", "balance"], "gap says when"),
        (
            {**GIVEN, "algorithm": "madpipe", "options": {"charge": "best"}},
            ["--algorithm", "madpipe", "-O", "charge=best"],
            "charge: 'best' is not one of full, tight, paper",
        ),
        ({**GIVEN, "replicas": "1,1"}, ["--replicas", "1,1"], "replicas goes with split"),
        ({**GIVEN, "weights": "2bw", "for_": "torch"}, ["--weights", "2bw", "--for", "torch"], "weights flush"),
    ],
)
def test_it_refuses_by_the_command_lines_sentences(given, more, sentence, path, pipeplan):
    with pytest.raises(pp.BadInput) as caught:
        pp.plan(path, **given)
    assert sentence in str(caught.value)
    said = more if given.get("mem") is None and not more else [*SMALL[2:], *more] if more else more
    code, out, err = pipeplan("plan", path, "--gpus", "2", *said)
    assert (code, out) == (2, "")
    assert in_python(err.removeprefix("error: ").rstrip("\n")) == str(caught.value), "in the names of keywords"


def in_python(sentence):
    named = sentence.replace("--for", "for_")
    return re.sub(r"(?:--|-O (?=\w))([a-z-]+[a-z])", lambda x: x[1].replace("-", "_"), named)


def test_what_is_no_plan_and_what_does_not_fit_are_errors_of_their_own(path):
    with pytest.raises(pp.Infeasible, match=r"feasible from 20 MB per GPU"):
        pp.plan(path, gpus=1, mem="1MB")
    found = pp.plan(path, **GIVEN, split="4*2")
    for call, sentence in (
        (lambda: found.simulate("zigzag"), "^schedule: 'zigzag' is not one of"),
        (lambda: found.simulate("all"), "^schedule: 'all' is not one of"),
        (lambda: found.simulate(microbatches="8"), "^microbatches: '8' is not a whole number"),
        (lambda: found.simulate(jitter="5%"), "^jitter: '5%' is not a number"),
        (lambda: found.schedules("gpipe", 3), "^names: .* is not a list of which each is a text"),
        (lambda: found.export("jax"), "^target: 'jax' is not one of"),
        (lambda: found.ranks(0), "^steps: 0 is not"),
    ):
        with pytest.raises(pp.BadInput, match=sentence):
            call()
    with pytest.raises(TypeError, match="gpu_count"):
        pp.plan(path, gpu_count=2)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"weights": "1bw"}, "weights: '1bw' is not one of flush, 2bw, 2bw-uniform, stash, latest"),
        ({"optimizer": "lion"}, "optimizer: 'lion' is not one of sgd, momentum, adam"),
        ({"precision": "fp8"}, "precision: 'fp8' is not one of fp32, mixed"),
        ({"checkpointing": "all"}, "checkpointing: 'all' is not one of none, stages, segments"),
        ({"zero": 4}, "zero: '4' is not one of 0, 1, 2, 3, any"),
        ({"zero": True}, "zero: 'True' is not one of 0, 1, 2, 3, any"),
        ({"effort": "some"}, "effort: 'some' is not one of quick, normal, high"),
        ({"solver": "glpk"}, "solver: 'glpk' is not one of cbc, highs"),
        ({"schedule": "zigzag"}, "schedule: 'zigzag' is not one of"),
        ({"algorithm": "best"}, "algorithm: 'best' is not one of auto"),
        ({"for_": "jax"}, "for_: 'jax' is not one of megatron"),
        ({"batch": 0}, "batch: 0 is not between 1 and"),
        ({"batch": 1.5}, "batch: '1.5' is not a whole number or a text"),
        ({"accumulate": -1}, "accumulate: -1 is not between 1 and"),
        ({"mem": 8}, "mem: 8 is 8 B; write a text with its unit, such as '8GB'"),
        ({"bandwidth": 12}, "bandwidth: 12 is 12 B/s; write a text with its unit, such as '12GB/s'"),
        ({"mem": None, "gpu": 7}, "gpu: '7' is not a text"),
        ({"mem": ["1GB"]}, "mem: '['1GB']' is not a whole number or a text"),
        ({"gpus": (2, "x")}, "gpus: "),
        ({"gpus": ()}, "gpus: '()' is not a whole number"),
        ({"options": "x"}, "options: 'x' is not a dictionary"),
        ({"latency": 5}, "latency: '5' is not a text"),
        ({"offload": "yes"}, "offload: 'yes' is not True or False"),
        ({"gap": float("nan")}, "gap: nan is not a number to compute with"),
        ({"gap": "1%"}, "gap: '1%' is not a number"),
        ({"platform": 3}, "platform: '3' is not a text or a Platform"),
        ({"split": [4, 4]}, "split: '[4, 4]' is not a text"),
        ({"time_limit": 3}, "time_limit: '3' is not a text or a Deadline"),
        ({"status": "loud"}, "status: 'loud' is not a Status"),
        ({"progress": 1}, "progress: '1' is not a function"),
    ],
)
def test_what_the_command_line_would_not_take_is_refused_here_too(more, sentence, path):
    with pytest.raises(pp.BadInput) as caught:
        pp.plan(path, **{**GIVEN, **more})
    assert str(caught.value).startswith(sentence)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize("given", [3, None, b"profile", [], {}])
def test_what_is_no_profile_is_said(given):
    with pytest.raises(pp.BadInput, match=r"^profile: .* is not "):
        pp.plan(given, gpus=2, mem="1GB")
    with pytest.raises(pp.BadInput, match=r"^path: .* is not a text or a path"):
        pp.read_plan(given)
