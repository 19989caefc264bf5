"""An infeasible problem explains itself, and its advice is true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cases.chains import published

from pipeplan.errors import Infeasible
from pipeplan.partition import ALGORITHMS
from pipeplan.plan import Allocation, Alternative, Stage
from pipeplan.planner.periodic.explain import fewest_gpus, least_memory, possible
from pipeplan.planner.periodic.incumbent import Incumbent, Settings
from pipeplan.planner.periodic.portfolio import EFFORTS
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.alternatives import with_alternatives
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem
from pipeplan.units import parse_bytes
from scripts.studies.pipedream.released import pipedream_released

GB = 10**9


def reason(problem: Problem, algorithm: str = "contiguous") -> str:
    with pytest.raises(Infeasible) as caught:
        make_plan(problem, algorithm)
    return str(caught.value)


def heavy(layers: int = 6) -> Chain:
    """Return a chain whose weights are the trouble: 3 GB of versions and gradient for each layer under 2bw."""
    return Chain("heavy", tuple(Layer(f"l{i}", 10, 20, GB, 1000) for i in range(layers)), 1000)


def test_least_memory_and_fewest_gpus_are_true_and_tight() -> None:
    problem = Problem(heavy(), Platform.flat(2, 4 * GB))
    sentence = reason(problem)
    assert "weights 9 GB" in sentence
    match = re.search(r"from ([0-9.]+ GB) per GPU, or with (\d+) GPUs", sentence)
    assert match, sentence
    enough = parse_bytes(match[1].replace(" ", ""))
    make_plan(replace(problem, platform=Platform.flat(2, enough)), "contiguous")
    reason(replace(problem, platform=Platform.flat(2, enough - 2 * 10**7)))
    make_plan(replace(problem, platform=Platform.flat(int(match[2]), 4 * GB)), "contiguous")
    reason(replace(problem, platform=Platform.flat(int(match[2]) - 1, 4 * GB)))


def test_another_weights_policy_is_offered_only_when_it_helps() -> None:
    sentence = reason(Problem(heavy(2), Platform.flat(1, 5 * GB)))
    assert "--weights flush" in sentence
    assert "--weights latest" in sentence
    make_plan(Problem(heavy(2), Platform.flat(1, 5 * GB), Policy("flush")))
    assert "--weights" not in reason(Problem(heavy(2), Platform.flat(1, 3 * GB))).split("feasible")[1]


def test_checkpointing_is_offered_when_it_helps() -> None:
    layers = tuple(Layer(f"l{i}", 10, 20, 0, 1000, saved_bytes=GB) for i in range(4))
    sentence = reason(Problem(Chain("wide", layers, 1000), Platform.flat(1, 3 * GB), checkpointing="none"))
    assert "activations 4 GB" in sentence
    assert "checkpointing" not in sentence  # one stage of four layers needs its 4 GB while it runs backward
    deep = tuple(Layer(f"l{i}", 10, 20, 0, GB) for i in range(2))
    chain = Chain("deep", (Layer("first", 10, 20, 0, GB, saved_bytes=0), *deep), 1000)
    assert possible(Problem(chain, Platform.flat(1, 2 * GB))) is not None


def test_sharing_the_optimizers_state_is_offered_when_it_helps() -> None:
    """A layer of 1 GB takes 3 GB and 2 of state; 2 replicas that share it take 4 GB each."""
    problem = Problem(heavy(1), Platform.flat(2, 4 * GB + 10**6), Policy(optimizer="adam"))
    sentence = reason(problem)
    assert sentence.endswith("or with --zero 1")
    shared = make_plan(problem.with_policy(Policy(optimizer="adam", zero=1)), "contiguous").plan
    assert shared.allocation.stages[0].replicas == 2
    assert "--zero" not in reason(replace(problem, replicas=False))
    assert "--zero" not in reason(replace(problem, platform=Platform.flat(2, 3 * GB)))


def test_a_heuristic_that_cannot_run_points_to_one_that_can() -> None:
    problem = Problem(published("resnet50"), Platform.flat(4, 16 * GB))
    sentence = reason(problem, "pipedream")
    assert "--algorithm contiguous finds a plan" in sentence
    make_plan(problem, "contiguous")


def test_tied_layers_name_the_policies_that_allow_the_cut() -> None:
    """Apart, a stage has 3 GB of versions and gradient, with Adam 2 GB more, the second one a gradient that waits."""
    chain = replace(heavy(2), tied=((0, 1),))
    stash = Policy("stash", accumulate=1, optimizer="adam")
    tight, roomy = Platform.flat(2, 55 * GB // 10), Platform.flat(2, 65 * GB // 10)
    words = "layers 0 (l0) and 1 (l1) share weights and must stay on one GPU under --weights stash"
    sentence = reason(Problem(chain, tight, stash))
    assert words in sentence
    assert "with --weights flush" in sentence
    assert "with --weights 2bw" not in sentence
    assert "with --weights 2bw, with --weights flush" in reason(Problem(chain, roomy, stash))
    for weights, platform in (("flush", tight), ("2bw", roomy)):
        make_plan(Problem(chain, platform, replace(stash, weights=weights, accumulate=None)))
    reason(Problem(chain, tight, replace(stash, weights="2bw", accumulate=None)))


def test_a_plan_says_what_shared_weights_cost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []

    def limited(problem: Problem, settings: Settings) -> Incumbent:
        limits.append(settings.node_limit)
        return Incumbent(problem, settings)

    monkeypatch.setattr("pipeplan.planner.what_if.alternatives.Incumbent", limited)
    layers = tuple(Layer(f"l{i}", 1000, 2000, 10, 10) for i in range(4))
    problem = Problem(Chain("made", layers, 10, tied=((0, 3),)), Platform.flat(4, 10**6), Policy("stash", 16), False)
    found = with_alternatives(make_plan(problem), problem)
    apart = make_plan(problem.with_policy(Policy("2bw", accumulate=16)), "contiguous")
    (other,) = [x for x in found.plan.provenance.alternatives if x.weights == "2bw"]
    assert other == Alternative("2bw", 16, apart.evaluation.period_ns)
    assert found.evaluation.period_ns == 2 * 3000, "layers 0 and 3 are on one GPU"
    assert limits == [EFFORTS["quick"].nodes], "else one integer program could take a minute"


def test_search_functions() -> None:
    problem = Problem(heavy(), Platform.flat(2, 4 * GB))
    least = least_memory(problem)
    assert least == 9 * GB + 3 * 1000 + 2 * 1000  # three layers: weights, saved inputs, and the cut's two buffers
    assert fewest_gpus(problem) == 6
    assert fewest_gpus(Problem(heavy(1), Platform.flat(1, GB))) is None


def test_the_first_allocation_that_no_period_makes_fit_is_remembered() -> None:
    layers = tuple(Layer(f"l{i}", 10, 20, 1000, 10) for i in range(4))
    problem = Problem(Chain("made", layers, 10), Platform.flat(2, 6000, 10**9), Policy("flush", accumulate=4))
    incumbent = Incumbent(problem, Settings())
    tight, tighter = (Allocation((Stage(0, cut, (0,)), Stage(cut, 4, (1,)))) for cut in (1, 3))
    for allocation in (tight, tighter):
        incumbent.try_(allocation)
    assert incumbent.best is None
    assert incumbent.rejected == tight


def test_a_baselines_claim_is_said_even_where_its_split_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published optimizer gives two GPUs of VGG-16 a stage that takes no time."""
    servers = (Level(4, 10 * GB), Level(4, 5 * GB // 4))
    row = replace(ALGORITHMS["pipedream"], partition=pipedream_released)
    monkeypatch.setitem(ALGORITHMS, "pipedream", row)  # type: ignore[arg-type]
    with pytest.raises(Infeasible) as caught:
        make_plan(Problem(published("vgg16"), Platform((Device(16 * GB),) * 16, servers)), "pipedream")
    sentence = str(caught.value)
    assert "the algorithm's split breaks a rule: stage 1 takes no time" in sentence
    assert sentence.endswith(
        "pipedream's own claim for its split (layers 0-30 on 12, 31-31 on 2, 32-33 on 1, 34-39 on 1 GPUs) is 67.134 ms "
        "per microbatch, which no schedule or validator has confirmed"
    )
