"""Under autocast a model trains as in a plain loop under it, in stages, and takes what was planned."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import chain_of, largest_difference, plan_of, uncorrected
from torch import nn
from torch.nn import functional

from pipeplan.errors import BadInput
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.plan import Stage
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.model.autocast import Autocast
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.estimate import estimate_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.runtime.training.half import HalfOptions


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Kinds(nn.Module):
    """Each kind of operation to autocast: cast down, left in 32 bits, promoted, out of its reach; a shared weight."""

    def __init__(self):
        super().__init__()
        self.table, self.twice, self.norm = nn.Embedding(20, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.cell, self.conv, self.head = nn.LSTM(16, 16, batch_first=True), nn.Conv1d(16, 16, 3), nn.Linear(16, 20)
        self.full = nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.table(tokens)
        x = self.norm(self.twice(self.twice(x)) + x)
        x, _ = self.cell(Doubled.apply(x))
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            x = self.full(x.float())
        return self.head(torch.softmax(x @ x.transpose(1, 2), -1) @ x)


def error(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def traced(batch):
    torch.manual_seed(1)
    return Kinds(), torch.zeros(batch, 6, dtype=torch.long), error


def listed(batch):
    torch.manual_seed(1)
    layers = [nn.Embedding(20, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 20)]
    return layers, torch.zeros(batch, 4, dtype=torch.long), error


def tokens(index, seed):
    x = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(index))
    return x, (3 * x[:, 1:-1] + 1) % 20


def other_tokens(index, seed):
    x, target = tokens(index, seed)
    return x[:, :4].clone(), target


def plain(build, data, dtype, steps, accumulate, lr, scale):
    model, _, loss = build(4)
    model = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    optimizer = torch.optim.Adam(model.train().parameters(), lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(step * accumulate, (step + 1) * accumulate):
            x, target = data(index, 0)
            with torch.autocast("cpu", dtype):
                value = loss(model(x), target)
            losses.append(float(value.detach()))
            value.backward(torch.tensor(scale / accumulate))
        for weight in model.parameters():
            weight.grad /= scale
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("dtype", "scale", "build", "data", "recomputed"),
    [
        (torch.bfloat16, 1.0, traced, tokens, False),
        (torch.bfloat16, 1.0, traced, tokens, True),
        (torch.float16, 2.0**10, listed, other_tokens, True),
    ],
)
def test_a_run_equals_plain_torch_and_its_plan(dtype, scale, build, data, recomputed, tmp_path):
    chain = chain_of(build, 4, data=data, autocast=Autocast(dtype))
    names = [layer.name for layer in chain.layers]
    cut, end = names.index("cell" if "cell" in names else "gelu3"), len(chain)
    again = ((cut, end - 1),) if recomputed else ()
    plan = plan_of(chain, [Stage(0, cut, (0,)), Stage(cut, end, (1,), again)], accumulate=2, optimizer="adam")
    plan = replace(plan, policy=replace(plan.policy, precision="autocast"))
    spec = ModelSpec(f"{__name__}:{build.__name__}", f"{__name__}:{data.__name__}")
    half = HalfOptions(loss_scale=scale)
    report = run_plan(plan, spec, uncorrected(steps=3, lr=0.01, half=half, save=tmp_path / "s"))
    losses, state = plain(build, data, dtype, 3, 2, 0.01, scale)
    assert report.losses == tuple(losses)
    saved = torch.load(tmp_path / "s")
    assert largest_difference(saved, state if build is traced else {k: state[k] for k in saved}) == 0
    assert all(x.measured_bytes <= x.allowed_bytes for x in report.activations)
    assert all(x.measured_bytes == x.planned_bytes for x in report.states)
    assert all(x.weight_bytes == 4 * x.parameters for x in chain.layers)


def test_a_profile_counts_a_cast_copy_of_a_weight_for_each_microbatch_in_flight():
    layers = {x.name: x for x in chain_of(traced, 4, data=tokens, autocast=Autocast(torch.bfloat16)).layers}
    assert layers["twice"].saved_bytes == 2 * (16 * 16 + 4 * 6 * 16)  # weight and input, both cast
    assert layers["twice"].weight_bytes == 4 * 16 * 17


def test_an_estimate_for_a_gpu_has_the_lists_of_gpus():
    options = MeasureOptions(autocast=Autocast(torch.bfloat16))
    found = estimate_model(listed, 4, accelerator("a100"), options, name="x", date="today").chain
    sizes = {layer.name: layer.output_bytes for layer in found.layers}
    count = 4 * 4 * 16
    assert sizes["linear1"] == 2 * count  # a product, cast down
    assert sizes["layernorm2"] == 4 * count  # in 32 bits there, and in 16 on a CPU
    assert sizes["loss"] == 4
    here = chain_of(listed, 4, data=other_tokens, autocast=Autocast(torch.bfloat16))
    assert {layer.name: layer.output_bytes for layer in here.layers}["layernorm2"] == 2 * count


def test_precision_is_that_of_the_profile():
    chain = chain_of(listed, 4, data=other_tokens)
    cast = replace(chain, dtype="autocast-bfloat16")
    plan = plan_of(cast, [(0, 3, (0,)), (3, 6, (1,))], accumulate=2)
    with pytest.raises(BadInput, match=r"--precision fp32: test was profiled in autocast-bfloat16, .*--dtype float32"):
        lower_run(plan, 1)
    wrong = replace(plan, chain=chain, policy=replace(plan.policy, precision="autocast"))
    with pytest.raises(BadInput, match=r"--precision autocast: test was profiled in float32.* --dtype autocast-bfloat"):
        lower_run(wrong, 1)
