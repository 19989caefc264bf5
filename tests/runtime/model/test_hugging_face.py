"""Transformers models by name; where the library isn't installed nothing of this can be tried."""

import json
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

import pipeplan as pp
from pipeplan.cost.saved import saved_bytes
from pipeplan.errors import BadInput
from pipeplan.partition.granularity import merge_blocks, merge_zero_time
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.hugging_face import named
from pipeplan.runtime.model.build.loading import load_model
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers isn't installed")

SIZES = (
    "num_hidden_layers=4,hidden_size=16,intermediate_size=24,num_attention_heads=4,num_key_value_heads=2,vocab_size=29,"
    "sequence=8"
)
LLAMA = f"LlamaForCausalLM,{SIZES}"


def test_a_model_by_its_class_is_planned_and_run_as_plain_training_does_it():
    build = named(LLAMA)
    found = measure_model(build, 2, MeasureOptions(steps=1, warmup=0), name="llama", date="today", data=build.data(2))
    assert [note.partition(":")[0] for note in found.notes] == ["use_cache of LlamaForCausalLM is set to False"]
    blocks = merge_zero_time(merge_blocks(found.chain))
    assert [x.name for x in blocks.layers] == [
        "input labels", "input input_ids..model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm",
        "lm_head..cross_entropy_loss", "loss",
    ]  # fmt: skip
    model, inputs = build(2)
    model.config.use_cache = False
    permanent = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(**inputs).loss
    whole = sum(x.nbytes() for key, x in storages.items() if key not in permanent)
    # what is made of constants alone, here the rotary table, each layer makes, and saves, for itself
    table = 8 * 4 * 4
    assert (saved_bytes(found.chain, 0, len(found.chain)) - whole) % table == 0
    assert saved_bytes(found.chain, 0, len(found.chain)) <= whole + 4 * 4 * table
    loaded = load_model(ModelSpec(f"hf:{LLAMA}"), 2, 0)
    modules = [code.module for layer in loaded.layers for code in layer.codes]
    codes = "".join(module.code for module in modules if isinstance(module, fx.GraphModule))
    assert codes.count("aten.scaled_dot_product_attention") == 4
    assert codes.count(", None, 0.0, True") == 4, "without a mask, as in plain training"
    inputs, target = loaded.data(0, 0)
    assert target is None
    values = dict(enumerate(inputs))
    for code in (code for layer in loaded.layers for code in layer.codes):
        values |= dict(zip(code.makes, code.run(code.module, *(values.get(v) for v in code.reads)), strict=True))
    assert torch.equal(next(reversed(values.values())), loss)
    named_state = {name for layer in loaded.layers for name in layer.names.values()}
    assert named_state | set(loaded.unused) == set(model.state_dict())


def test_cores_of_attention_run_again_with_the_same_gradients():
    found = []
    for how in ("eager", "again"):
        model, inputs = named(f"{LLAMA},attention_dropout=0.3,attn_implementation={how}")(2)
        kept = {}
        torch.manual_seed(1)
        with saved_tensors_hooks(lambda x, kept=kept: kept.setdefault(x.untyped_storage()._cdata, x), lambda x: x):
            loss = model.train()(**inputs).loss
        loss.backward()
        found.append((sum(x.nbytes for x in kept.values()), loss, *(x.grad for x in model.parameters())))
    (most, *plain), (least, *again) = found
    assert all(map(torch.equal, plain, again))
    assert most - least >= 4 * 2 * 4 * 8 * 8 * 4  # of each layer the scores that dropout's product reads, at least


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GptOssForCausalLM", "GptOssAttention attends with sinks of its own, so its core can't run again alone"),
        ("XLNetLMHeadModel", "XLNetLMHeadModel has attention that cannot be replaced by one that runs again"),
    ],
)
def test_attention_that_cannot_run_again_alone_is_refused(kind, words):
    gpt_oss = "num_hidden_layers=1,hidden_size=16,intermediate_size=8,num_local_experts=2,head_dim=4,vocab_size=9"
    sizes = "n_layer=1,d_model=16,n_head=2,d_inner=8,vocab_size=9" if "XLNet" in kind else gpt_oss
    build = named(f"{kind},{sizes},sequence=4,attn_implementation=again")
    with pytest.raises(BadInput, match=words):
        (lambda model, inputs: model(**inputs))(*build(1))


def test_a_folder_has_config_and_perhaps_weights(tmp_path):
    build = named("GPT2LMHeadModel,n_layer=1,n_embd=8,n_head=2,vocab_size=11,n_positions=16,sequence=4")
    with torch.no_grad():
        model, _ = build(1, seed=3)
        model.lm_head.weight.fill_(0.5)
    model.save_pretrained(tmp_path)
    again = named(str(tmp_path))
    assert (again.kind.__name__, again.sequence) == ("GPT2LMHeadModel", 16)
    assert torch.equal(again(1)[0].lm_head.weight, model.lm_head.weight)
    random = named(f"{tmp_path / 'config.json'},n_layer=2")
    assert random(1)[0].config.n_layer == 2
    assert not torch.equal(random(1)[0].lm_head.weight, model.lm_head.weight)
    assert isinstance(random(1)[0], nn.Module)
    config = json.loads((tmp_path / "config.json").read_text())
    for entries, words in (
        ({**config, "model_type": "mine"}, "'mine' isn't in transformers .* isn't executed"),
        ({**config, "architectures": []}, "names no class"),
        ({}, "has no model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        with pytest.raises(BadInput, match=words):
            named(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("LlamaForCausalLm", "nor a model of transformers .*; did you mean LlamaForCausalLM"),
        ("LlamaForCausalLM,num_hidden_layer=2", "has no entry 'num_hidden_layer'; did you mean num_hidden_layers"),
        ("no/such/folder", "No such file"),
    ],
)
def test_what_is_not_there_is_named(text, words):
    with pytest.raises(BadInput, match=words):
        named(text)


def test_what_has_no_loss_is_refused():
    with pytest.raises(BadInput, match=r"BertModel has no head whose labels are known .* as module:build"):
        named("BertModel,num_hidden_layers=1,hidden_size=8,num_attention_heads=2,vocab_size=9").data(1)(0, 0)


def test_what_is_saved_as_the_library_names_it_is_loaded_by_the_library(tmp_path):
    from transformers import GPT2LMHeadModel

    build = "hf:GPT2LMHeadModel,n_layer=1,n_embd=8,n_head=2,vocab_size=11,n_positions=16,sequence=4"
    plan = pp.plan(pp.profile(build, microbatch=1, steps=1), gpus=1, mem="1GB", weights="flush", accumulate=1).plan
    for name in ("model.safetensors", "state.pt"):
        pp.run_plan(plan, ModelSpec(build), RunOptions(steps=1, lr=0.1, save=tmp_path / name))
    state = torch.load(tmp_path / "state.pt")
    found = GPT2LMHeadModel.from_pretrained(tmp_path, local_files_only=True).state_dict()
    assert all(torch.equal(found[name], state[name]) for name in found)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
