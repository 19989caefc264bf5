"""Profiles of live modules and of models by their names."""

import re

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import pipeplan as pp


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(self.norm(self.tokens(tokens)))


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("how", [{"gpu": "a100"}, {"steps": 1, "seconds": 1.0}], ids=["estimated", "measured"])
def test_a_live_module_is_profiled_and_stays_as_it_is(how):
    module = Tied().eval()
    before, tokens = state(module), torch.randint(11, (6,))
    profile = pp.profile(module, tokens, nn.functional.cross_entropy, **how)
    assert (profile.name, profile.microbatch) == ("Tied", 6)
    assert sum(layer.weight_bytes for layer in profile.layers) >= 11 * 8 * 4
    assert profile.chain.shared or profile.chain.tied, "the copy's head is still the embedding"
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    after = state(module)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_by_its_name_is_estimated_on_the_way(tmp_path, pipeplan):
    target = str(tmp_path / "plan.json")
    arguments = ["zoo:gpt-tiny,blocks=2", "--gpus", "2", "--gpu", "a100", "--split", "3,3", "-o", target]
    code, out, err = pipeplan("plan", *arguments, "--microbatch", "4", "--precision", "mixed")
    assert (code, err) == (0, "")
    said = "layers as estimated for NVIDIA A100 SXM 80GB, not measured, microbatches of 4 in bfloat16"
    assert said in out
    assert "assumed: kernels reach what fits 98 published iterations of GPTs" in out
    assert re.search(r"^estimated +from \d.* to \d.*, as 9 of 10 such estimates were when measured$", out, re.MULTILINE)
    assert pp.read_plan(target).plan.chain.microbatch == 4
    code, _, err = pipeplan("plan", "zoo:gpt-tiny", "--gpus", "2", "--mem", "1GB")
    assert code == 2
    assert "name its GPU with --gpu (pipeplan list has them), or measure it first: pipeplan profile zoo:gpt-tiny" in err


def test_a_grid_of_a_model_by_its_name_has_an_estimate_of_each_size():
    found = pp.grid("zoo:gpt-tiny,blocks=2", gpus=2, gpu="a100", batch=8, microbatches=[2, 4], effort="quick")
    assert found.plan.provenance.options["microbatches"] == [2, 4]
    assert not any("scaled" in sentence for sentence in found.assumptions)


def test_what_is_no_module_or_has_no_tensor_is_one_sentence():
    with pytest.raises(pp.BadInput, match="inputs: have no tensor"):
        pp.profile(nn.Linear(2, 2), None, nn.functional.mse_loss, gpu="a100")
    with pytest.raises(pp.BadInput, match="leave out device"):
        pp.profile("zoo:gpt-tiny", gpu="a100", device="cpu")
    with pytest.raises(pp.BadInput, match="dtype: torch has no type 'float8'; there are float32, bfloat16"):
        pp.profile("zoo:gpt-tiny", gpu="h100", dtype="float8")


def test_an_engine_has_its_host_times_and_its_bytes_per_parameter():
    asked = {"gpus": 2, "gpu": "a100", "microbatch": 4, "optimizer": "adam", "precision": "mixed", "split": "3,3"}
    usual, megatron = (pp.plan("zoo:gpt-tiny,blocks=2", **asked, engine=x) for x in (None, "megatron"))
    assert megatron.period_ns > 1.3 * usual.period_ns, "which all layers wait for"
    assert any("operations issued as --engine megatron says" in x for x in megatron.assumptions)
    assert (usual.plan.policy.bytes_per_parameter, megatron.plan.policy.bytes_per_parameter) == (None, 18)
    own = pp.plan("zoo:gpt-tiny,blocks=2", **asked, engine="megatron", bytes_per_parameter=20)
    assert own.plan.policy.bytes_per_parameter == 20
    with pytest.raises(pp.BadInput, match="engine: goes with a model's name"):
        pp.plan(usual.plan.chain, gpus=2, mem="1GB", engine="megatron")
