from dataclasses import replace
from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")

import msgspec
from cases.forked import forked
from cases.runtime import Whole
from torch import nn
from torch.nn import functional

from pipeplan import zoo
from pipeplan.api.given.problems import problem_of
from pipeplan.api.given.profiles import read_profile
from pipeplan.cost.roofline import Constants, Product, product_share, timed
from pipeplan.errors import BadInput, CodeFailed
from pipeplan.files.machines.accelerators import HOST_OFF, UNCHECKED, WITHIN, Accelerator, accelerator
from pipeplan.files.profiles import profile_text
from pipeplan.partition.granularity import merge_articulation, merge_share
from pipeplan.planner.plan import make_plan
from pipeplan.problem import PassWork, Platform, Problem
from pipeplan.runtime.profiler.estimate import estimate_model
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.runtime.training.update.optimizers import optimizer_maker

PLAIN = {"host_time": "0us", "rates": {}, "compute_share": 0.6, "bandwidth_share": 0.8}
ROUND = Accelerator(
    "round", "16GB", "1000GB/s", {"float32": 10.0, "tf32": 100.0, "bfloat16": 200.0}, launch="1us", **PLAIN
)


def mean_square(output, target):
    return (output - target).square().mean()


def estimate(build, batch=4, device=ROUND, data=None, host_time=None, **options):
    about = {"name": "model", "date": "today", "data": data, "constants": device.constants(host_time)}
    return estimate_model(build, batch, device, MeasureOptions(**options), **about).chain


def estimate_with(build, constants):
    device = accelerator("a100")
    return estimate_model(build, 4, device, name="model", date="today", constants=constants)


def linear(batch):
    return [nn.Linear(4096, 2048, bias=False), nn.Linear(2048, 1000)], torch.randn(batch, 4096), mean_square


def test_a_product_takes_its_flops_or_its_bytes_whichever_is_longer():
    layer = estimate(linear, 4096).layers[0]
    flops = 2 * 4096 * 4096 * 2048
    assert layer.forward_ns == pytest.approx(flops / (0.6 * 10e12) * 1e9, abs=2)
    summed = 3 * 4 * 4096 * 2048 / (0.8 * 1e12) * 1e9
    one = "the network's input needs no gradient: one product of the same size, added to the microbatches' before"
    assert layer.backward_ns == pytest.approx(layer.forward_ns + summed, abs=2), one
    few = estimate(linear, 1).layers[0]
    moved = 4 * (4096 * 2048 + 4096 + 2048)
    assert few.forward_ns == pytest.approx(moved / (0.8 * 1e12) * 1e9, abs=2)
    tiny = estimate(lambda b: ([nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(b, 4), mean_square))
    assert tiny.layers[0].forward_ns == 1000
    second = estimate(linear, 4096).layers[1]
    assert second.backward_ns > 1.9 * second.forward_ns


def test_convolutions_of_float32_run_in_tf32_and_products_do_not():
    def convolution(batch):
        return [nn.Conv2d(256, 256, 3, padding=1)], torch.randn(batch, 256, 64, 64), mean_square

    flops = 2 * 4 * 256 * 256 * 9 * 64 * 64
    fast = estimate(convolution).layers[0]
    old = Accelerator("old", "16GB", "1000GB/s", {"float32": 10.0}, launch="1us", **PLAIN)
    slow = estimate(convolution, device=old).layers[0]
    assert slow.forward_ns == pytest.approx(flops / (0.6 * 10e12) * 1e9, abs=2)
    assert fast.forward_ns < slow.forward_ns / 3


def test_each_gradient_of_a_convolution_is_a_kernel_of_its_kind():
    shapes = [(1, 1, 1), (3, 1, 1), (3, 1, 4), (3, 2, 1)]  # size, stride, groups
    kinds = ["convolution-1x1", "convolution-3x3", "convolution-grouped", "convolution"]

    def build(batch):
        middle = [nn.Conv2d(256, 256, k, s, k // 2, groups=g, bias=False) for k, s, g in shapes]
        return [nn.Conv2d(3, 256, 1), *middle], torch.randn(batch, 3, 64, 64), mean_square

    def layers(rates):
        device = msgspec.structs.replace(ROUND, tflops={"float32": 10.0}, rates=rates)
        return estimate(build, device=device).layers[1:-1]

    plain = layers({})
    faster = layers({kind: 2.0 + i for i, kind in enumerate(kinds)})
    for i, (size, stride, groups) in enumerate(shapes):
        flops = 2 * 4 * 256 * (256 // groups) * size**2 * (64 // stride) ** 2
        assert plain[i].forward_ns == pytest.approx(flops / (0.6 * 10e12) * 1e9, abs=2)
        summed = max(3 * 4 * 256 * (256 // groups) * size**2 / (0.8 * 1e12) * 1e9, 1000)
        assert plain[i].backward_ns == pytest.approx(2 * plain[i].forward_ns + summed, abs=4)
        assert faster[i].forward_ns == pytest.approx(plain[i].forward_ns / (2 + i), abs=2)


def test_the_shape_of_a_convolution_says_what_it_reaches():
    wide, narrow = (Product(1, 1 << 20, n, 9 * n) for n in (256, 64))
    assert narrow.share(80) < 0.8 * wide.share(80)
    assert wide.winograd_share(80) == product_share(1, 1 << 20, 256, 256, 80, 40)
    deep = Product(1, 576, 64, 1 << 20, weights=True)
    assert deep.share(80) > 2 * product_share(1, 576, 64, 1 << 20, 80), "its depth is shared out"


def test_an_estimate_of_convolutions_says_what_plans_on_it_are_worth(tmp_path):
    model = zoo.load("small-cnn")
    chain = estimate(model, data=model.data(4))
    assert "13% longer on average" in chain.worth
    assert not estimate(small).worth
    path = tmp_path / "profile.json"
    path.write_text(profile_text(chain))
    _, assumed = problem_of(read_profile(path), gpus=2, mem="1GB")
    assert chain.worth in assumed
    assert merge_share(chain, Fraction(1, 2)).worth == chain.worth


def test_an_estimate_says_within_which_factors_such_were_when_measured():
    low, high = WITHIN[False]
    graphs = estimate(small, device=msgspec.structs.replace(accelerator("a100"), host_time="graphs"))
    assert graphs.within == (low, high), "no host is waited for"
    rarely = estimate(small, device=msgspec.structs.replace(accelerator("rtx4090"), host_time="graphs"))
    assert rarely.within == (low, round(high * UNCHECKED, 2)), "nothing was measured on one"
    (guessed, said), own = (
        estimate(small, device=msgspec.structs.replace(accelerator("a100"), host_time=x)).within for x in (None, "30us")
    ), (0.9, 1.1)  # fmt: skip
    assert said == (round(low / HOST_OFF, 2), round(high * HOST_OFF, 2)), "all of it waits for its host"
    assert guessed[0] == pytest.approx(low * 9 / 15, rel=0.25)
    assert guessed[1] == pytest.approx(high * 57 / 15, rel=0.25)
    fitted = msgspec.structs.replace(accelerator("a100"), host_time="graphs", within=own)
    assert estimate(small, device=fitted).within == own
    convolutions = estimate(zoo.load("small-cnn"), device=msgspec.structs.replace(accelerator("v100"), host_time="0us"))
    assert convolutions.within == WITHIN[True]


def test_the_type_decides_peak_and_bytes():
    wide = estimate(linear, 4096, dtype=torch.bfloat16)
    assert wide.dtype == "bfloat16"
    assert wide.layers[0].weight_bytes == 2 * 4096 * 2048
    assert wide.layers[0].parameters == 4096 * 2048
    assert wide.layers[0].output_bytes == 2 * 4096 * 2048
    assert wide.layers[0].forward_ns < estimate(linear, 4096).layers[0].forward_ns / 5
    with pytest.raises(BadInput, match="no peak is known for float16, only for float32, tf32, bfloat16"):
        estimate(linear, dtype=torch.float16)


def test_views_are_free_and_look_ups_read_what_they_put_out():
    class Turned(nn.Module):
        def forward(self, x):
            return x.view(-1, 2, 64).transpose(1, 2)[:, 1:].unsqueeze(1)

    def build(batch):
        return [nn.Embedding(10**6, 128), Turned()], torch.zeros(batch, dtype=torch.int64), mean_square

    chain = estimate(build)
    assert chain.layers[1].forward_ns == 0
    assert chain.layers[0].forward_ns == 1000, "and not the time to read the table"
    assert chain.layers[0].backward_ns > 10**6 * 128 * 4 / (0.8 * 1e12) * 1e9, "the dense gradient is written"


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.project = nn.Linear(64, 192)
        self.dropout = dropout

    def forward(self, x):
        query, key, value = self.project(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_fused_and_saves_no_scores(dropout):
    def build(batch):
        return [Attention(dropout)], torch.randn(batch, 512, 64), mean_square

    chain = estimate(build, 2)
    states = 2 * 512 * 64 * 4
    scores = 2 * 2 * 512 * 512 * 4
    assert chain.layers[0].saved_bytes < 8 * states < scores
    assert chain.layers[0].saved_bytes >= 5 * states, "input, query, key, value, output"


@pytest.mark.parametrize(("name", "batch"), [("gpt-tiny", 4), ("small-cnn", 4), ("resnet50,image=32", 2)])
def test_sizes_and_saved_bytes_equal_the_measured_ones(name, batch):
    for each in ("small-cnn", name):  # what runs for the first time in a process may be freed a little later
        model, once = zoo.load(each), MeasureOptions(steps=1, warmup=0)
        measured = measure_model(model, batch, once, name="m", date="d", data=model.data(batch)).chain
    estimated = estimate(model, batch, data=model.data(batch))

    def sizes(chain):
        return [replace(x, forward_ns=0, backward_ns=0, optimizer_ns=0, work=None) for x in chain.layers]

    assert sizes(estimated) == sizes(measured)
    assert (estimated.tied, estimated.dtype, estimated.input_bytes) == (
        measured.tied,
        measured.dtype,
        measured.input_bytes,
    )


def test_an_estimate_says_what_it_is_and_repeats():
    model = zoo.load("gpt-tiny")
    chain = estimate(model, data=model.data(4), device=accelerator("v100"))
    assert chain == estimate(model, data=model.data(4), device=accelerator("V100"))
    assert chain.device == "NVIDIA V100 SXM2 16GB (estimated)"
    assert chain.source.startswith("estimated by pipeplan ")
    assert "not measured; today" in chain.source
    real = model(4)[0][0]
    assert next(real.parameters()).device.type == "cpu", "nothing fake is left behind"
    assert float(model.data(4)(0, 0)[0].sum()) > 0


def test_an_lstm_pays_for_each_step_and_keeps_its_workspace():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(64, 64, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    chains = [estimate(lambda b, n=n: ([Recurrent()], torch.randn(b, n, 64), mean_square)) for n in (50, 100)]
    short, long = (chain.layers[0] for chain in chains)
    assert short.forward_ns >= 50 * 2 * 1000
    assert 1.8 < long.forward_ns / short.forward_ns < 2.2
    assert short.saved_bytes >= 6 * 4 * 50 * 64 * 4


@pytest.mark.parametrize(
    ("name", "factor", "most"),
    [("sgd", 3, 3), ("momentum", 5, 5), ("adam", 7, 7), ("adafactor", 3, 30), ("muon", 20, 200)],
)
def test_the_optimizer_moves_its_state(name, factor, most, monkeypatch):
    """Those that GPUs step by fused kernels move each number once; none is run by torch on made-up values."""
    monkeypatch.delattr("torch._subclasses.fake_tensor.run_fallback_kernel")
    chain = estimate(linear, optimizer=optimizer_maker(name, 0.0, as_on_gpus=True))
    traffic = 4 * 4096 * 2048 / (0.8 * 1e12) * 1e9
    assert 0.9 * factor * traffic <= chain.layers[0].optimizer_ns <= 1.1 * most * traffic
    assert estimate(linear).layers[0].optimizer_ns <= chain.layers[0].optimizer_ns


def test_split_backward_is_estimated_too():
    second = estimate(linear, 512, split_backward=True).layers[1]
    assert 0.4 < second.backward_weight_ns / second.backward_ns < 0.6


def test_resnet50_as_one_module_and_as_its_hand_written_layers_give_the_same_plan():
    """Its first layers, to the first of the blocks that halve the picture."""
    model = zoo.load("resnet50,image=128")

    def first(batch):
        layers, x, _ = model(batch)
        return layers[:6], x, mean_square

    def build(batch):
        layers, x, loss = first(batch)
        return Whole(layers), x, loss

    graphs = {"device": accelerator("v100"), "host_time": "graphs"}  # which add up
    chain, dag = estimate(first, **graphs), estimate(build, **graphs)
    assert dag.edges is not None
    merged = merge_articulation(dag)
    ends = {x.name: i for i, x in enumerate(merged.layers)}
    assert len(ends) == len(merged)
    for layer in chain.layers[1:-2]:  # each residual block is one layer between two cuts of one tensor
        found = next(x for x in merged.layers if x.name.startswith(f"layers.{layer.name}."))
        assert (found.forward_ns, found.backward_ns) == pytest.approx((layer.forward_ns, layer.backward_ns), abs=10)
        assert (found.weight_bytes, found.output_bytes) == (layer.weight_bytes, layer.output_bytes)
    for memory in (16 * 10**9, 2 * 10**8):
        problems = [Problem(x, Platform.flat(4, memory, 12 * 10**9), replicas=False) for x in (chain, dag)]
        plans = [make_plan(problem, "contiguous").plan for problem in problems]
        assert plans[1].pattern.period_ns <= plans[0].pattern.period_ns + 100, "the DAG has all cuts of the chain"


def test_what_looks_at_values_is_refused_with_what_to_do():
    def build(batch):
        size = int(torch.randint(4, 5, ()))
        return [nn.Linear(size, size)], torch.randn(batch, size), mean_square

    with pytest.raises(CodeFailed, match=r"the model cannot run without values: .* measure on a device"):
        estimate(build)


HUGE = """
import re, time
from pathlib import Path
from pipeplan import zoo
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.runtime.profiler.estimate import estimate_model
model = zoo.load("myelin-100b")
began = time.process_time()
chain = estimate_model(model, 1, accelerator("a100"), name="", date="", data=model.data(1)).chain
kilobytes = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]  # not its parent's, as rusage has
print(sum(x.parameters for x in chain.layers), time.process_time() - began, int(kilobytes) * 1024)
"""


def test_a_hundred_billion_parameters_take_under_a_minute_and_four_gigabytes():
    """A minute of the processor's, which no other process takes."""
    done = forked(HUGE)
    assert done.returncode == 0, done.stderr
    parameters, seconds, memory = map(float, done.stdout.split())
    assert parameters > 100e9
    assert seconds < 60
    assert memory < 4e9


def small(batch):
    return [nn.Linear(64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 64))], torch.randn(batch, 64), mean_square


def test_a_small_layer_takes_what_its_operations_take_the_host():
    device = msgspec.structs.replace(ROUND, host_time="20us,10us")
    layer = estimate(small, device=device).layers[1]
    assert layer.work.forward.operations == 2
    assert layer.forward_ns == 2 * 20_000
    assert layer.work.backward.operations == 6, "two products, the bias' sum, the activation, and two sums of gradients"
    assert layer.backward_ns == 6 * 10_000
    large = estimate(linear, 4096, device=device)
    assert [x.forward_ns for x in large.layers[:2]] == [x.forward_ns for x in estimate(linear, 4096).layers[:2]]


def test_which_engine_issues_operations_decides_what_each_takes():
    times = {x: estimate_with(small, accelerator("a100").constants(x)) for x in ("eager", "compiled", "graphs")}
    first = {name: found.chain.layers[0].forward_ns for name, found in times.items()}
    assert first == {"eager": 20_000, "compiled": 5_000, "graphs": 5_000}, "no kernel is shorter than 5 us"
    assert times["eager"].host_bound == (0, 1, 2)
    assert times["graphs"].host_bound == ()
    assert "20us of the host per operation forward, 10us backward" in times["eager"].chain.source
    assert "nothing waits for the host" in times["graphs"].chain.source


def test_work_by_the_same_constants_takes_the_same_time_and_by_others_another():
    constants = accelerator("a100").constants()
    chain = estimate_with(small, constants).chain
    assert timed(chain, constants) == chain
    slower = timed(chain, replace(constants, forward_host_ns=30_000))
    assert [x.forward_ns for x in slower.layers] == [x.forward_ns * 3 // 2 for x in chain.layers]
    assert [x.backward_ns for x in slower.layers] == [x.backward_ns for x in chain.layers]
    merged = merge_share(chain, Fraction(1))
    assert merged.layers[0].work.forward.operations == sum(x.work.forward.operations for x in chain.layers)


def test_in_a_network_of_single_operations_the_host_runs_ahead_of_long_kernels():
    constants = Constants(forward_host_ns=20_000)
    short, long = PassWork(0, 0, 1, 1), PassWork(800_000, 0, 0, 1)
    assert constants.passes_ns([long, short, short], backward=False, ahead=True) == [1e6, 5e3, 5e3]
    assert constants.passes_ns([short, long], backward=False, ahead=True) == [2e4, 1e6]
    assert constants.passes_ns([long, short], backward=False, ahead=False) == [1e6, 2e4]


def test_a_products_shape_says_what_it_reaches():
    full = product_share(1, 256 * 12, 128 * 9, 1 << 20, 108)
    assert full == pytest.approx(1, abs=1e-3), "108 tiles on 108 multiprocessors"
    assert product_share(1, 256 * 12, 128 * 9 + 1, 1 << 20, 108) < 0.95, "a second wave for one more tile"
    assert product_share(1, 128, 128, 1 << 20, 108) == 0.2
    assert product_share(1, 256 * 12, 128 * 9, 192, 108) == pytest.approx(0.5)
    known = msgspec.structs.replace(ROUND, units=108)
    assert estimate(linear, 64, device=known).layers[0].forward_ns > estimate(linear, 64).layers[0].forward_ns


def test_a_block_without_fused_attention_saves_what_the_literature_says():
    model = zoo.load("gpt2-small,blocks=1,hidden=256,heads=4,sequence=128,dropout=0.1,attention=unfused,vocabulary=128")
    block = estimate(model, 2, data=model.data(2), dtype=torch.bfloat16).layers[1]
    s, b, h, a = 128, 2, 256, 4
    assert block.saved_bytes == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=2e-3), "Korthikanti et al. 2022"


def test_losses_take_what_their_kernels_read_and_write():
    """Bytes of each logit: 2 + 4 to widen it, and its gradient back; log-softmax 8, and 12 after 4 of zeros; or step by
    step maximum 4, difference, exponent and quotient 8 each, sum 4, one product 8; fused 2 + 2, twice."""
    sizes = "gpt2-small,blocks=1,hidden=64,heads=4,sequence=1024,vocabulary=50000,tied=false"
    same, exact, fused = (
        estimate(zoo.load(f"{sizes},loss={loss}"), 2, data=zoo.load(sizes).data(2), dtype=torch.bfloat16).layers[-1]
        for loss in ("same", "fp32", "fused")
    )
    logits = 2 * 1024 * 50000
    assert [x.saved_bytes / logits for x in (same, exact, fused)] == pytest.approx([4, 4, 2], rel=0.01)
    moved = [
        [1000 * work.memory_ns / logits for work in (x.work.forward, x.work.backward)] for x in (same, exact, fused)
    ]
    assert moved[0] == pytest.approx([6 + 8, 4 + 12 + 6], rel=0.01)
    assert moved[1] == pytest.approx([6 + 32, 8 + 6], rel=0.01)
    assert moved[2] == pytest.approx([4, 4], rel=0.01)


def test_an_rms_norm_is_one_kernel_as_on_gpus():
    """It saves its input and a number for each row, also where a module is traced; one by hand is as it is written."""

    def norm(batch):
        return [nn.Linear(512, 512), nn.RMSNorm(512), nn.Linear(512, 512)], torch.randn(batch, 512), mean_square

    def whole(batch):
        return nn.Sequential(*norm(batch)[0]), torch.randn(batch, 512), mean_square

    class Written(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def written(batch):
        layers, x, loss = norm(batch)
        return [layers[0], Written(), layers[2]], x, loss

    layer, other = (estimate(build, 64).layers[1] for build in (norm, written))
    assert 0 <= layer.saved_bytes - 4 * 64 * 512 <= 8 * 64
    assert layer.work.forward.operations == 1
    assert other.work.forward.operations > 3
    assert (
        estimate(lambda batch: (Whole(whole(batch)[0]), *whole(batch)[1:]), 64).layers[1].saved_bytes
        == layer.saved_bytes
    )
