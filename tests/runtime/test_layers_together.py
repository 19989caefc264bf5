"""Plans whose layers several processes run together: real runs against plain training of the whole model."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from cases import parted
from cases.runtime import built, largest_difference, plan_of, serial

import pipeplan as pp
from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.problem import Platform
from pipeplan.runtime.engine.job import HeldOutOptions, RunOptions
from pipeplan.runtime.exchange.transport import PeerLost, exchanging, number_processes
from pipeplan.runtime.model.build.hugging_face import named
from pipeplan.runtime.model.build.loading import load_model
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.half import HalfOptions
from pipeplan.runtime.training.state.checkpoint import newest
from pipeplan.runtime.training.update.optimizers import Choice
from pipeplan.zoo.text.rank_part import Shard

GPT = (
    "gpt-tiny,blocks=2,hidden=32,heads=4,sequence=16,vocabulary=200,tied=true"  # embedding, 2 blocks, norm, head, loss
)
LLAMA = "llama-tiny,blocks=2,hidden=32,heads=4,groups=2,feed_forward=48,sequence=16,vocabulary=300"
QWEN = (
    "hf:Qwen3ForCausalLM,num_hidden_layers=1,hidden_size=16,intermediate_size=24,num_attention_heads=4,head_dim=8,"
    "num_key_value_heads=2,vocab_size=140,sequence=8,max_position_embeddings=8,tie_word_embeddings=true"
)
CLOSE = 1e-5  # sums of parts come in another order


@cache
def estimated(model, **more):
    name = model if ":" in model else f"zoo:{model}"
    return pp.profile(name, gpu="h100", microbatch=2, tensor="1,2", name=model, granularity="block", **more).chain


def profiled(model):
    found = estimated(model)
    return replace(found, variants=()), found.part(found.variants[0])


def planned(model, stages, tensor=2, **policy):
    """A plan whose stages run on so many GPUs for each device that they name."""
    chain = profiled(model)[tensor - 1]
    plan = plan_of(chain, [x if isinstance(x, Stage) else Stage(*x) for x in stages], accumulate=4, **policy)
    return replace(plan, platform=Platform.flat(len(plan.platform) * tensor, 10**12).grouped(tensor))


def several(model, widths, cuts, dtype=None, **policy):
    """A plan whose stages are one GPU, or group of them, or several replicas, that are so wide."""
    chain = estimated(model) if dtype is None else estimated(model, dtype=dtype)
    ends, stages, first = [0, *cuts, len(chain)], [], 0
    for s, width in enumerate(widths):
        each = width if isinstance(width, tuple) else (width,)
        stages.append(Stage(*ends[s : s + 2], tuple(range(first, first + sum(each), each[0])), tensor=each[0]))
        first += sum(each)
    return plan_of(chain, stages, accumulate=4, **policy)


def trained(plan, model, steps, **options):
    given = {"steps": steps, "device": "cpu", "seed": 2, "timeout_s": 60.0, **options}
    spec = ModelSpec(model, "cases.parted:data" if model.startswith("cases") else None)
    return run_plan(plan, spec, RunOptions(**given))


def as_planned(report, activations=True):
    assert report.activations
    assert report.states
    for held in report.activations if activations else ():
        assert 0 <= held.planned_bytes - held.measured_bytes <= 4  # the loss keeps one number less than torch's
    for state in report.states:
        assert state.measured_bytes <= state.planned_bytes


def test_two_stages_of_two_train_a_tied_gpt_as_one_process_and_go_on_alone(tmp_path):
    folder, saved = tmp_path / "run", tmp_path / "state.pt"
    plan = planned(GPT, [(0, 2, (0,)), (2, 6, (1,))], optimizer="adam")
    about = {"steps": 5, "accumulate": 4, "optimizer": "adam", "lr": 0.002, "seed": 2, "clip": 0.5}
    norms = []
    losses, state = serial(GPT, 2, **about, norms=norms)
    report = trained(plan, GPT, 3, lr=0.002, clip_norm=0.5, checkpoint=folder)
    as_planned(report)
    assert report.losses == pytest.approx(losses[:12], abs=CLOSE)
    assert report.gradient_norms == pytest.approx(norms[:3], rel=CLOSE)
    whole = {name: tuple(x.shape) for name, x in state.items()}
    checkpoint = newest(folder)
    assert checkpoint.position.step == 3
    read = {}
    for name in checkpoint.files:
        read |= torch.load(f"{checkpoint.path}/{name}", weights_only=True)["model"]
    assert {name: tuple(x.shape) for name, x in read.items()} == {k: v for k, v in whole.items() if k in read}
    alone = planned(GPT, [(0, 6, (0,))], tensor=1, optimizer="adam")
    report = trained(alone, GPT, 5, lr=0.002, clip_norm=0.5, checkpoint=folder, resume=True, save=saved)
    assert report.losses == pytest.approx(losses[12:], abs=CLOSE)
    assert largest_difference(torch.load(saved), state) <= CLOSE


def test_a_llama_goes_on_in_parts_with_replicas_that_share_their_steps(tmp_path):
    folder, saved = tmp_path / "run", tmp_path / "state.pt"
    alone = planned(LLAMA, [(0, 6, (0,))], tensor=1, optimizer="adam")
    losses, state = serial(LLAMA, 2, steps=4, accumulate=4, optimizer="adam", lr=0.002, seed=2, clip=0.5)
    trained(alone, LLAMA, 2, lr=0.002, clip_norm=0.5, checkpoint=folder)
    plan = planned(LLAMA, [Stage(0, 6, (0, 1), ((1, 3),))], optimizer="adam")
    plan = replace(plan, policy=replace(plan.policy, zero=1))
    report = trained(plan, LLAMA, 4, lr=0.002, clip_norm=0.5, checkpoint=folder, resume=True, save=saved)
    assert report.losses == pytest.approx(losses[8:], abs=CLOSE)
    as_planned(report, activations=False)  # over groups of heads a CPU's attention keeps more than the planned GPU's
    assert largest_difference(torch.load(saved), state) <= CLOSE


def test_a_llama_in_two_parts_before_replicas_of_the_rest(tmp_path):
    saved = tmp_path / "state.pt"
    losses, state = serial(LLAMA, 2, steps=2, accumulate=4, optimizer="adam", lr=0.002, seed=2, clip=0.5)
    plan = several(LLAMA, (2, (1, 1)), (2,), optimizer="adam")
    plan = replace(plan, policy=replace(plan.policy, zero=1))
    report = trained(plan, LLAMA, 2, lr=0.002, clip_norm=0.5, save=saved)
    assert report.losses == pytest.approx(losses, abs=CLOSE)
    as_planned(report, activations=False)
    assert largest_difference(torch.load(saved), state) <= CLOSE


def test_ranks_of_several_widths_skip_an_update_together():
    """The loss scale is so large that gradients overflow, in the narrow stage or in one of the wide one's parts."""
    found = []
    for widths in ((1,), (2, 1)):
        plan = several(LLAMA, widths, (2,)[: len(widths) - 1], dtype="float16", optimizer="adam")
        plan = replace(plan, policy=replace(plan.policy, precision="mixed"))
        scale = HalfOptions("fp16", 2.0**22, 0)
        found.append(trained(plan, LLAMA, 6, lr=0.002, clip_norm=0.5, half=scale))
    alone, together = found
    assert together.skipped == alone.skipped != ()
    assert together.loss_scale == alone.loss_scale
    assert together.losses == pytest.approx(alone.losses, abs=0.02)
    assert together.gradient_norms[-1] == pytest.approx(alone.gradient_norms[-1], rel=0.02)


NO_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers isn't installed")


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        (GPT, (2, 2)),
        (LLAMA, (2, 1, 1)),
        pytest.param(QWEN, (2,), marks=NO_TRANSFORMERS),
    ],
)
def test_gradients_are_those_of_one_process(tmp_path, name, widths):
    """Each weight's, which are what one update by plain SGD at rate 1 takes off it. The GPT's embedding and head are
    one table in two stages, and Qwen's in one, whose norms of heads are whole and used by every part."""
    saved, even = tmp_path / "state.pt", len(set(widths)) == 1
    model = name if even else name.replace("tied=true", "tied=false")
    stages = [(0, 6, (0,))] if name is QWEN else [(0, 2, (0,)), (2, 6, (1,))]
    plan = planned(model, stages) if even else several(model, widths, (2, 3))
    report = trained(plan, model, 1, lr=1.0, save=saved)
    assert report.compared.startswith("the first microbatch trains as in plain torch")
    as_planned(report, activations=name is GPT)  # over groups of heads a CPU's attention keeps more than planned
    if name is QWEN:
        build = named(model.removeprefix("hf:"))
        (whole, _), data = build(2, seed=2), build.data(2)
        losses = [whole(**data(m, 2), use_cache=False).loss for m in range(4)]
    else:
        whole, loss, data = built(model, 2, 2)
        losses = [loss(whole(x), target) for x, target in (data(m, 2) for m in range(4))]
    (sum(losses) / 4).backward()
    before = whole.state_dict()
    assert report.losses == pytest.approx([float(x.detach()) for x in losses], abs=CLOSE)
    after = torch.load(saved)
    for x, weight in whole.named_parameters():
        assert float((before[x] - after[x] - weight.grad).abs().max()) <= CLOSE, x


def test_stages_of_two_degrees_train_a_gpt_as_one_process_and_go_on_in_equal_ones(tmp_path):
    folder, saved, model = tmp_path / "run", tmp_path / "state.pt", GPT.replace("tied=true", "tied=false")
    losses, norms = [], []
    losses, state = serial(model, 2, steps=4, accumulate=4, optimizer="adam", lr=0.002, seed=2, clip=0.5, norms=norms)
    plan = several(model, (2, 1, 1), (2, 3), optimizer="adam")
    report = trained(plan, model, 2, lr=0.002, clip_norm=0.5, checkpoint=folder)
    as_planned(report)
    assert report.losses == pytest.approx(losses[:8], abs=CLOSE)
    assert report.gradient_norms == pytest.approx(norms[:2], rel=CLOSE)
    plan = several(model, (1, 2), (2,), optimizer="adam")
    report = trained(plan, model, 3, lr=0.002, clip_norm=0.5, checkpoint=folder, resume=True)
    as_planned(report)
    assert report.losses == pytest.approx(losses[8:12], abs=CLOSE)
    plan = planned(model, [(0, 6, (0,))], optimizer="adam")
    report = trained(plan, model, 4, lr=0.002, clip_norm=0.5, checkpoint=folder, resume=True, save=saved)
    assert report.losses == pytest.approx(losses[12:], abs=CLOSE)
    assert largest_difference(torch.load(saved), state) <= CLOSE


@pytest.mark.parametrize(
    ("model", "widths", "begins"),
    [
        ("clip-tiny,picture_blocks=1,blocks=1", (2, 1), ("text.embedding.tokens",)),
        ("llava-tiny,picture_blocks=1,blocks=1", ((1, 1), 2), ("language.embedding..cat",)),
    ],
)
def test_two_towers_of_degrees_of_their_own_train_as_one_process(tmp_path, model, widths, begins):
    """One tower is before the other in the order of the layers, on GPUs of its own: neither reads the other of clip."""
    saved, norms = tmp_path / "state.pt", []
    names = [x.name for x in estimated(model).layers]
    plan = several(model, widths, [names.index(x) for x in begins])
    losses, state = serial(model, 2, steps=2, accumulate=4, optimizer="sgd", lr=0.1, seed=2, clip=0.5, norms=norms)
    report = trained(plan, model, 2, lr=0.1, clip_norm=0.5, save=saved)
    assert report.compared.startswith("the first microbatch trains as in plain torch")
    assert report.losses == pytest.approx(losses, abs=CLOSE)
    assert report.gradient_norms == pytest.approx(norms, rel=CLOSE)
    as_planned(report, activations=False)
    assert largest_difference(torch.load(saved), state) <= CLOSE


def test_layers_of_ones_own_are_parted_as_their_author_says(tmp_path):
    saved, model = tmp_path / "state.pt", "cases.parted:scaled,tensor_plan=cases.parted:whole_plan"
    report = trained(planned(model, [(0, 5, (0,))]), model, 2, lr=0.2, save=saved)
    as_planned(report)
    assert report.compared.startswith("the first microbatch trains as in plain torch")
    torch.manual_seed(2)
    layers = parted.layers(scaled=True)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.2)
    for step in range(2):
        for m in range(4 * step, 4 * step + 4):
            x, target = parted.data(m, 2)
            (parted.loss(layers(x), target) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(torch.load(saved), layers.state_dict()) <= CLOSE


@pytest.mark.parametrize("widths", [(1, 2), (2,)])
def test_what_runs_in_parts_is_evaluated_meanwhile_and_alone(tmp_path, widths):
    saved, model = tmp_path / "state.pt", "cases.parted:build,tensor_plan=cases.parted:plan"
    plan = several(model, widths, (2,)[: len(widths) - 1])
    asked = HeldOutOptions("cases.parted:data", every=1, count=2)
    report = trained(plan, model, 1, lr=0.2, save=saved, held_out=asked)
    as_planned(report)
    torch.manual_seed(2)
    layers = parted.layers()
    for m in range(4):
        x, target = parted.data(m, 2)
        (parted.loss(layers(x), target) / 4).backward()
    torch.optim.SGD(layers.parameters(), lr=0.2).step()
    losses = [float(parted.loss(layers(x), target).detach()) for x, target in (parted.data(m, 2) for m in range(4))]
    assert report.evaluations[1]["loss"] == pytest.approx(sum(losses[:2]) / 2, abs=CLOSE)
    report = trained(plan, model, 1, load=saved, evaluates=True)
    assert report.losses == pytest.approx(losses, abs=CLOSE)
    with pytest.raises(BadInput, match="have each a part of what they put out"):
        trained(plan, model, 1, held_out=replace(asked, metrics="cases.parted:loss"))


def test_parts_that_train_otherwise_than_the_whole_are_refused():
    """Of a norm inside of the parts each has the gradient of its own heads alone."""
    model = "cases.parted:scaled,tensor_plan=cases.parted:plan"
    with pytest.raises(BadInput, match=r"would train differently from its own code: the gradient of 2\.scale"):
        trained(planned(model, [(0, 5, (0,))]), model, 1)


def test_what_cannot_be_parted_is_refused_in_a_sentence():
    own = "cases.parted:build,tensor_plan=cases.parted:"
    with pytest.raises(BadInput, match=r"no module is called '\*\.upp'"):
        profiled(f"{own}misspelt")
    with pytest.raises(BadInput, match="must name the matrices to split"):
        profiled("cases.parted:build")
    plan = planned(f"{own}plan", [(0, 5, (0,))])
    replaced = replace(plan, chain=replace(plan.chain, sequence_parallel=True))
    with pytest.raises(BadInput, match="splits layers along the sequence"):
        trained(replaced, f"{own}plan", 1)
    with pytest.raises(BadInput, match="as running each layer on several GPUs needs"):
        trained(plan, f"{own}plan", 1, optimizer=Choice("Adafactor"))
    with pytest.raises(BadInput, match="dropout: of the scores of attention"):
        load_model(ModelSpec("zoo:gpt-tiny,attention=unfused,dropout=0.1", ranks=2, place=0), 2, 0)


def test_a_part_of_a_table_that_is_longer_than_the_vocabulary():
    whole = torch.arange(10.0).view(5, 2)
    shards = [Shard(0, 5, 4, 1, 2, index) for index in range(2)]
    assert [x.of(whole).tolist() for x in shards] == [whole[:4].tolist(), [[8, 9], [0, 0], [0, 0], [0, 0]]]
    assert torch.equal(shards[0].whole([x.of(whole) for x in shards]), whole)
    rows = torch.arange(12.0).view(1, 12)
    shards = [Shard(1, 12, 2, 3, 2, index) for index in range(2)]
    assert shards[1].of(rows).tolist() == [[2, 3, 6, 7, 10, 11]]
    assert torch.equal(shards[0].whole([x.of(rows) for x in shards]), rows)


def test_who_was_lost_is_a_process_of_all():
    number_processes([1, 3])
    with pytest.raises(PeerLost) as lost, exchanging("a sum", 0, 1):
        raise RuntimeError("gone")
    number_processes([])
    assert lost.value.peers == (1, 3)
