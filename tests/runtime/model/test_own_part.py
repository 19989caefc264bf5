"""Each rank makes its own layers alone, to the bit as they are in the whole model, and takes memory for no others."""

import gc
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import built_apart
from cases.runtime import chain_of, largest_difference, plan_of
from oracles.host_memory import most_bytes
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeplan import zoo
from pipeplan.errors import BadInput, CodeFailed
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.hugging_face import named
from pipeplan.runtime.model.build.loading import OwnPart, load_model, load_weights
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.build.state_file import SafetensorsWriter, read_state
from pipeplan.runtime.model.deferred import Deferred
from pipeplan.runtime.model.structure import tensors_of
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.zoo.data import corpus

AWKWARD = ModelSpec("cases.built_apart:awkward", "cases.built_apart:sequences")
MODELS = {
    "gpt": ModelSpec("gpt-tiny,tied=true"),
    "awkward": AWKWARD,
    "tied": ModelSpec("cases.traced:tied_transformer", "cases.traced:tokens"),
    "statistics": ModelSpec("cases.traced:residual", "cases.traced:images"),
}
LLAMA = (
    "hf:LlamaForCausalLM,hidden_size=16,intermediate_size=32,num_hidden_layers=1,num_attention_heads=2,"
    "num_key_value_heads=2,vocab_size=50,sequence=4"
)


def part_of(spec, start, stop, *, given=False):
    """The model of ``spec`` with its layers ``start`` to ``stop`` made."""
    part = OwnPart(spec, 2, 3, small=0)
    model = part.load()
    return part.filled(model, lambda found: [x.module for x in found.layers[start:stop]], lambda x: x, given)


def assert_same(whole, model, start, stop):
    """All is as it is in ``whole``: traces, shapes, names, and the values of the layers from ``start`` to ``stop``."""
    assert (model.specs, model.first_names, model.chain) == (whole.specs, whole.first_names, whole.chain)
    assert [layer.names for layer in model.layers] == [layer.names for layer in whole.layers]
    for index, (one, other) in enumerate(zip(whole.layers, model.layers, strict=True)):
        if isinstance(one.module, fx.GraphModule):
            assert one.module.code == other.module.code
        pairs = list(zip(tensors_of([one.module]), tensors_of([other.module]), strict=True))
        if start <= index < stop:
            for x, y in pairs:
                assert type(x) is type(y)
                assert (x.dtype, x.stride(), x.requires_grad) == (y.dtype, y.stride(), y.requires_grad)
                assert torch.equal(x, y)


@pytest.mark.parametrize("name", MODELS)
def test_own_layers_are_those_of_the_whole_model(name):
    whole = load_model(MODELS[name], 2, 3)
    after = torch.get_rng_state()
    start = len(whole.layers) // 2
    model = part_of(MODELS[name], start, len(whole.layers))
    assert model.notes == whole.notes
    assert torch.equal(torch.get_rng_state(), after)
    assert_same(whole, model, start, len(whole.layers))


def test_a_transformers_model_initialises_after_its_construction():
    pytest.importorskip("transformers")
    spec = ModelSpec(LLAMA)
    whole = load_model(spec, 2, 3)
    middle = len(whole.layers) // 2
    assert_same(whole, part_of(spec, middle, len(whole.layers)), middle, len(whole.layers))


def test_a_transformers_folder_is_read_by_name(tmp_path):
    """Its head, which is tied, is in no file."""
    pytest.importorskip("transformers")
    small = "GPT2LMHeadModel,n_layer=1,n_embd=8,n_head=2,vocab_size=11,n_positions=16,sequence=4"
    model, _ = named(small)(1, seed=5)
    model.save_pretrained(tmp_path)
    spec = ModelSpec(f"hf:{tmp_path},sequence=4")
    whole = load_model(spec, 2, 3)
    middle = len(whole.layers) // 2
    part = part_of(spec, middle, len(whole.layers), given=True)
    assert part.source == tmp_path
    load_weights(part, part.source)
    assert_same(whole, part, middle, len(whole.layers))
    state = read_state(tmp_path)
    other = {f"old.{name}": x.clone() for name, x in state.items()}
    with (tmp_path / "model.safetensors").open("wb") as file:
        writer = SafetensorsWriter(file, {name: (x.shape, x.dtype) for name, x in other.items()})
        for name, x in other.items():
            writer.put([name], x)
    part = part_of(spec, middle, len(whole.layers))
    assert part.source is None
    assert "is built whole on every rank" in part.notes[-1]
    assert "which the model has" in part.notes[-1]


def test_memory_is_that_of_the_own_layers_and_of_one_more():
    """The rest of the model takes none, neither while it is built nor afterwards."""
    spec = ModelSpec("gpt-tiny,hidden=128,blocks=8,tied=true")
    corpus()  # the text that all models of one process share
    sizes = [layer.weight_bytes for layer in load_model(spec, 2, 3).layers]
    gc.collect()
    most, model = most_bytes(lambda: part_of(spec, 0, 3))
    assert sum(sizes[:3]) < most < sum(sizes[:3]) + max(sizes) < sum(sizes) / 2
    others = tensors_of([layer.module for layer in model.layers[3:9]])
    assert all(isinstance(x, FakeTensor) for x in others)


def test_small_tensors_are_made_at_once():
    part = OwnPart(ModelSpec("small-cnn"), 2, 3)
    assert not any(isinstance(x, FakeTensor) for layer in part.load().layers for x in tensors_of([layer.module]))


def test_what_others_keep_has_values():
    """A table that is cached while a model is built serves the next ones, too."""
    built_apart.shared_table.cache_clear()
    model = part_of(ModelSpec("cases.built_apart:cached", "cases.built_apart:vectors"), 0, 1)
    assert torch.equal(built_apart.shared_table(), torch.arange(8.0) / 8)
    assert type(built_apart.shared_table()) is torch.Tensor
    x = torch.ones(1, 8)
    assert torch.equal(model.layers[0].module(x), model.layers[0].module.linear(x) + torch.arange(8.0) / 8)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("build", "why"),
    [
        ("looking", "built_apart.py:"),
        ("with_statistics", "it runs a norm in training while it is built"),
        ("in_threads", "it is built by several threads"),
    ],
)
def test_a_model_that_cannot_be_put_off_is_built_whole_and_says_so(build, why):
    spec = ModelSpec(f"cases.built_apart:{build}", "cases.built_apart:vectors")
    built_apart.shared_table.cache_clear()
    model = part_of(spec, 0, 1)
    (note,) = model.notes
    assert note.startswith(f"{spec.build} is built whole on every rank, which takes host memory for all of it: ")
    assert why in note
    whole = load_model(spec, 2, 3)
    pairs = zip(tensors_of(x.module for x in whole.layers), tensors_of(x.module for x in model.layers), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert type(built_apart.shared_table()) is torch.Tensor


def test_an_error_of_the_builds_is_told_as_without_promises():
    spec = ModelSpec("cases.built_apart:unfitting", "cases.built_apart:vectors")
    with pytest.raises(CodeFailed, match=r"layers\[1\]: failed on float32 \(2, 8\): RuntimeError") as told:
        load_model(spec, 2, 3)
    with pytest.raises(CodeFailed) as again:
        part_of(spec, 0, 1)
    assert str(again.value) == str(told.value)


# --- without values -------------------------------------------------------------------------------------------------


def test_a_model_on_meta_gets_its_values_from_a_file(tmp_path):
    spec = ModelSpec("cases.built_apart:on_meta", "cases.built_apart:vectors")
    with pytest.raises(BadInput, match=r"0\.weight is on meta, without values; name a file that has them by --load"):
        part_of(spec, 0, 1)
    state = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).state_dict()
    torch.save(state, tmp_path / "s.pt")
    model = part_of(spec, 0, 2, given=True)
    load_weights(model, tmp_path / "s.pt")
    assert torch.equal(model.layers[0].module.weight, state["0.weight"])
    assert isinstance(model.layers[2].module.weight, FakeTensor)
    lost = ModelSpec("cases.built_apart:with_table_on_meta", "cases.built_apart:vectors")
    with pytest.raises(BadInput, match=r"a tensor of shape \(3,\) is on meta, without values, and in no file"):
        part_of(lost, 0, 1, given=True)


def test_what_a_file_will_have_is_not_made_first():
    """There is room alone for it; what is in no file is as it would be."""
    torch.manual_seed(3)
    whole, _, _ = built_apart.awkward(2)
    promised = Deferred(0)
    torch.manual_seed(3)
    with promised:
        model, _, _ = built_apart.awkward(2)
    most, value = most_bytes(lambda: promised.values([model.mask], model.parameters()))
    assert torch.equal(value(model.mask), whole.mask)
    assert most < 2 * sum(x.nbytes for x in (*model.parameters(), model.mask))
    assert value(model.head.weight).data_ptr() == value(model.layers[1].weight).data_ptr()


# --- runs -----------------------------------------------------------------------------------------------------------

WIDE_GPT = "gpt-tiny,hidden=192,blocks=2,tied=true"


def trained(model, data, loss, steps):
    """Losses and state of plain training: two microbatches of 4 for each update."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        for x, y in (data(2 * step, 0), data(2 * step + 1, 0)):
            losses.append(loss(model(x), y))
            (losses[-1] / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [x.item() for x in losses], model.state_dict()


@pytest.mark.parametrize("kind", ["chain", "traced"])
def test_two_ranks_train_as_the_whole_model(kind, tmp_path):
    if kind == "chain":
        spec, build, data = ModelSpec(WIDE_GPT), zoo.load(WIDE_GPT), zoo.load(WIDE_GPT).data(4)
        chain = chain_of(build, 4)
    else:
        spec = ModelSpec("cases.built_apart:wide", "cases.built_apart:wide_vectors")
        build, data = built_apart.wide, built_apart.wide_vectors
        chain = chain_of(build, 4, data=data)
    torch.manual_seed(0)
    model, _, loss = build(4)
    losses, state = trained(model, data, loss, steps=2)
    path = tmp_path / "trained.safetensors"
    plan = plan_of(chain, [(0, 3, (0,)), (3, len(chain), (1,))], weights="flush", accumulate=2)
    report = run_plan(plan, spec, RunOptions(steps=2, lr=0.1, save=path))
    assert report.notes == ()
    assert report.losses == pytest.approx(losses, abs=1e-5)
    assert largest_difference(read_state(path), state) < 1e-5
    if kind == "traced":
        on_meta = replace(spec, build="cases.built_apart:wide_on_meta")
        again = run_plan(plan, on_meta, RunOptions(steps=1, lr=0.1, load=path, save=tmp_path / "again.safetensors"))
        assert again.notes == ()
        assert read_state(tmp_path / "again.safetensors")["unused"].equal(state["unused"])
        assert again.losses[0] == pytest.approx(loss(model(data(0, 0)[0]), data(0, 0)[1]).item(), abs=1e-5)
