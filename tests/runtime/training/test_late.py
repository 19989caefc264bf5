"""Late gradients: compensated steps and predicted weights against golden figures, and against a loop of their own."""

from dataclasses import replace
from math import sqrt
from shutil import rmtree

import pytest

torch = pytest.importorskip("torch")

from cases.half import exploding
from cases.runtime import chain_of, emulated, largest_difference, plan_of, vectors, zoo_chain
from torch import nn

from pipeplan.check.evaluate import evaluate
from pipeplan.check.lateness import plan_delays
from pipeplan.errors import BadInput, InvalidPlan
from pipeplan.problem import Platform
from pipeplan.runtime.engine.asked import clipping, job_of
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.lowering.instructions import Forward
from pipeplan.runtime.lowering.lowered_run import Position, lower_run
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.half import AS_PROFILED, HalfOptions
from pipeplan.runtime.training.update.optimizers import Choice, compensated, correctable, delayed, predicted
from pipeplan.schedule.kinds import graph_of

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16"
STAGES = [(0, 2, (0,)), (2, 4, (1,)), (4, 6, (2,))]
GOLDEN = """
sgd   0.05 serial  0.950000 0.857500 0.731375 0.581294 0.417156 0.248574 0.084422 -0.067536 0.00592491 2.08e-05
sgd   0.05 none    0.950000 0.855000 0.722000 0.559550 0.377245 0.185193 -0.006516 -0.188314 0.0766838 0.00258
sgd   0.05 sc      0.905000 0.769500 0.606575 0.427565 0.243459 0.064441 -0.100564 -0.244234 0.0452778 -2.04e-05
sgd   0.05 predict 0.950000 0.855000 0.724500 0.569050 0.399445 0.226120 0.058636 -0.094739 0.0265634 -8.49e-06
sgd   0.05 both    0.905000 0.769500 0.611325 0.443365 0.276661 0.120416 -0.018201 -0.134134 0.00853078 -3.66e-08
sgd    0.2 serial  0.800000 0.460000 0.062000 -0.308600 -0.580420 -0.708974 -0.682878 -0.522816 -0.0304984 -1.34e-05
sgd    0.2 none    0.800000 0.420000 -0.082000 -0.617800 -1.083620 -1.379298 -1.428684 -1.197272 -11.1787 1.44e+04
sgd    0.2 sc      0.620000 0.078000 -0.465400 -0.872500 -1.047998 -0.958168 -0.636132 -0.170835 0.316368 0.00529
sgd    0.2 predict 0.800000 0.420000 -0.042000 -0.465800 -0.746420 -0.821058 -0.682824 -0.379275 0.158708 -0.00225
sgd    0.2 both    0.620000 0.078000 -0.389400 -0.619700 -0.571478 -0.316624 0.008715 0.268002 0.00122585 9.87e-12
adamw  0.1 serial  0.899000 0.798519 0.698911 0.600599 0.504080 0.409938 0.318843 0.231548 -0.00651655 -3.33e-06
adamw  0.1 none    0.899000 0.798101 0.697793 0.598508 0.500706 0.404903 0.311688 0.221728 0.0209194 -0.000626
adamw  0.1 sc      0.899000 0.798101 0.698452 0.600425 0.504458 0.411057 0.320792 0.234296 0.0121138 -3.36e-05
adamw  0.1 predict 0.899000 0.798101 0.698581 0.600638 0.504671 0.411207 0.320877 0.234405 -0.00706029 1.08e-05
adamw  0.1 both    0.899000 0.798101 0.699940 0.603828 0.510182 0.419544 0.332532 0.249826 -0.00153198 7.05e-08
"""  # half the square of one weight that begins as 1, gradients one update late: after updates 1 to 8, 50, 200


def made(name, weights, rate):
    if name == "sgd":
        return torch.optim.SGD(weights, rate, momentum=0.9)
    return torch.optim.AdamW(weights, rate, weight_decay=0.01)


def weights_of(name, rate, correction, updates, late=(1,)):
    """Yield the weight after each update. In turn its microbatches are ``late`` by so many updates."""
    weight = delayed(nn.Parameter(torch.ones(1, dtype=torch.float64)), sum(late) / len(late))
    optimizer = made(name, [weight], rate)
    if correction in ("sc", "both"):
        optimizer = compensated(optimizer)
    read = [weight.data.clone()] * (1 + max(late))
    for _ in range(updates):
        weight.grad = sum(read[-1 - x] for x in late) / len(late)
        optimizer.step()
        ahead = correction in ("predict", "both")
        of = predicted(optimizer, optimizer.param_groups[0], weight, rate) if ahead else weight.data
        read.append(of.clone())
        yield weight.item()


@pytest.mark.parametrize("row", GOLDEN.strip().splitlines(), ids=lambda row: " ".join(row.split()[:3]))
def test_figures_are_those_of_the_formulas_to_the_last_digit(row):
    name, rate, correction, *golden = row.split()
    found = list(weights_of(name, float(rate), correction, 200, (0,) if correction == "serial" else (1,)))
    for place, digits in zip((*range(8), 49, 199), golden, strict=True):
        last = len(digits.partition("e")[0].partition(".")[2]) - int(digits.partition("e")[2] or 0)
        assert found[place] == pytest.approx(float(digits), rel=0, abs=0.500001 * 10.0**-last)


@pytest.mark.parametrize(
    ("correction", "limit", "late"),
    [
        ("none", 0.1, (1,)),  # 1 - 0.9; plain training stands 3.8
        ("sc", 0.2531, (1,)),
        ("predict", 0.2702, (1,)),
        ("both", 0.2916, (1,)),
        ("none", 0.1 / (3 / 8), (1, 1, 1, 0, 0, 0, 0, 0)),
        ("none", 3.8, (0,)),
    ],
)
def test_up_to_a_limit_rates_are_stable(correction, limit, late):
    below, above = (list(weights_of("sgd", limit * x, correction, 3000, late)) for x in (0.98, 1.02))
    assert max(map(abs, below[-100:])) < 0.1
    assert not max(map(abs, above[-100:])) < 10


class Loop:
    """Each weight by itself, with the formulas as they are written down; ``rates`` are those of the updates."""

    def __init__(self, delays, name, rates, correction):
        self.delays, self.name, self.rates, self.correction = delays, name, rates, correction
        self.mean = {w: torch.zeros_like(w.data) for w in delays}
        self.square = {w: torch.zeros_like(w.data) for w in delays}
        self.count = 0

    def step(self):
        self.rate = self.rates[self.count]
        self.count += 1
        for w in self.delays:
            (self.momentum if self.name == "sgd" else self.adam)(w, w.grad)

    def share(self, w):
        return 0.9 ** self.delays[w] if self.correction in ("sc", "both") else 1.0

    def momentum(self, w, g):
        self.mean[w] = 0.9 * self.mean[w] + g
        w.data = torch.add(w.data, self.mean[w], alpha=-self.rate * self.share(w))
        if self.share(w) < 1:
            w.data = torch.add(w.data, g, alpha=-self.rate * (1 - self.share(w)) / (1 - 0.9))

    def adam(self, w, g):
        w.data = w.data * (1 - self.rate * 0.01)
        self.mean[w] = torch.lerp(self.mean[w], g, 1 - 0.9)
        self.square[w] = torch.addcmul(self.square[w] * 0.999, g, g, value=1 - 0.999)
        root = self.square[w].sqrt() / sqrt(1 - 0.999**self.count) + 1e-8
        scale = 1 - 0.9**self.count
        w.data = torch.addcdiv(w.data, self.mean[w], root, value=-self.rate * self.share(w) / scale)
        if self.share(w) < 1:
            w.data = torch.addcdiv(w.data, g, root, value=-self.rate * (1 - self.share(w)))

    def read(self, w):
        if self.correction not in ("predict", "both") or not self.delays[w]:
            return w
        along = self.mean[w]
        if self.name != "sgd":
            root = self.square[w].sqrt() / sqrt(1 - 0.999**self.count) + 1e-8
            along = torch.add(along / (1 - 0.9**self.count) / root, w.data, alpha=0.01)
        return torch.add(w.data, along, alpha=-self.delays[w] * self.rates[self.count])


def looped(legs, loop, interval=6, half=None, clip=None, scale=1.0):
    """Train ``exploding``, whose gradients don't here, in one process, by plans one after the other, from one number of
    updates to another each; return (losses, state)."""
    layers, _, loss = exploding(4)
    net = nn.Sequential(*layers)
    own = {w: nn.Parameter(w.detach().clone()) for w in net.parameters()}
    net.to(half)
    losses = []
    for plan, first, last in legs:
        listings = lower_run(plan, last, first=Position(first, first * interval)).instructions
        told = {(x.stage, x.microbatch): x.version for listing in listings for x in listing if isinstance(x, Forward)}
        delays, stages = [x.mean for x in plan_delays(plan, graph_of(plan))], plan.allocation.stages
        at = {w: s for s, x in enumerate(stages) for layer in layers[x.start : x.stop] for w in layer.parameters()}
        loop.delays.update((own[w], delays[s]) for w, s in at.items())
        for w in own.values():
            loop.mean.setdefault(w, torch.zeros_like(w.data))
            loop.square.setdefault(w, torch.zeros_like(w.data))
        history = {first: {w: x.data.clone() for w, x in own.items()}}
        for update in range(first, last):
            net.zero_grad()
            for m in range(update * interval, (update + 1) * interval):
                for w, s in at.items():
                    w.data.copy_(history[told[s, m]][w])
                x, target = vectors(m, 0)
                value = loss(net(x.to(half)).float(), target)
                losses.append(float(value.detach()))
                value.backward(torch.tensor(scale / interval))
            for w, x in own.items():
                x.grad = w.grad.float() / scale
            if clip is not None:
                nn.utils.clip_grad_norm_(own.values(), clip)
            loop.step()
            history[update + 1] = {w: loop.read(x).detach().clone() for w, x in own.items()}
    return losses, dict(zip(net.state_dict(), (x.detach() for x in own.values()), strict=True))


@pytest.fixture(scope="module")
def chain():
    return zoo_chain(GPT, 2)


def options_of(name, rate, **more):
    said = Choice("SGD", (("momentum", 0.9),)) if name == "sgd" else Choice("AdamW", (("weight_decay", 0.01),))
    return RunOptions(lr=rate, seed=2, optimizer=said, compares=False, **more)


@pytest.mark.parametrize(
    ("weights", "name", "correction"),
    [
        ("2bw", "sgd", "both"),
        ("2bw", "adamw", "both"),
        ("2bw", "sgd", None),  # late by half an update at most
        ("2bw-uniform", "sgd", None),
        ("stash", "sgd", "predict"),
        ("latest", "sgd", "predict"),
        ("latest", "adamw", "both"),
    ],
)
def test_a_run_is_a_loop_with_each_stages_own_delay_to_the_bit(weights, name, correction, chain, tmp_path):
    kind, rate = ("momentum", 0.05) if name == "sgd" else ("adam", 0.002)
    plan = plan_of(chain, STAGES, weights=weights, accumulate=6, optimizer=kind)
    delays = [x.mean for x in plan_delays(plan, graph_of(plan))]
    assert delays == [1, 1, 1] if weights == "2bw-uniform" else delays[0] > delays[1] >= delays[2] == 0
    options = options_of(name, rate, steps=4, delay_correction=correction, save=tmp_path / "s")
    report = run_plan(plan, ModelSpec(GPT), options)

    def late(own, stage):
        return Loop(dict.fromkeys(own, delays[stage]), name, [rate] * 9, correction or "both")

    losses, state = emulated(plan, GPT, 2, steps=4, optimizer=kind, lr=rate, seed=2, late=late)
    assert list(report.losses) == losses
    assert largest_difference(torch.load(tmp_path / "s"), state) == 0
    assert all(x.measured_bytes <= x.planned_bytes for x in report.states)
    plain, _ = emulated(plan, GPT, 2, steps=4, optimizer=kind, lr=rate, seed=2)
    assert plain != losses


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_it_goes_on_with_the_delays_of_another_plan_to_the_bit(name, chain, tmp_path):
    kind, rate = ("momentum", 0.05) if name == "sgd" else ("adam", 0.002)
    other = [(0, 3, (0,)), (3, 6, (1,))]
    one, two = (plan_of(chain, x, weights="2bw", accumulate=6, optimizer=kind) for x in (STAGES, other))
    options = options_of(name, rate, steps=3, delay_correction="both", checkpoint=tmp_path / "c")
    losses = [*run_plan(one, ModelSpec(GPT), options).losses]
    following = replace(options, steps=6, resume=True, save=tmp_path / "s")
    losses += run_plan(two, ModelSpec(GPT), following).losses
    about = {"optimizer": kind, "lr": rate, "seed": 2}
    remembered, loops = [], []

    def late(plan):
        delays = [x.mean for x in plan_delays(plan, graph_of(plan))]

        def make(own, stage):
            loops.append(loop := Loop(dict.fromkeys(own, delays[stage]), name, [rate] * 9, "both"))
            for w in own if remembered else ():
                loop.mean[w], loop.square[w] = remembered.pop(0)
                loop.count = 3
            return loop

        return make

    expected, state = emulated(one, GPT, 2, steps=3, late=late(one), **about)
    remembered += [(loop.mean[w], loop.square[w]) for loop in loops for w in loop.delays]
    more, state = emulated(two, GPT, 2, steps=6, late=late(two), first=3, before=state, **about)
    assert losses == [*expected, *more]
    assert largest_difference(torch.load(tmp_path / "s"), state) == 0


@pytest.mark.parametrize(
    ("name", "also"), [("sgd", "clipped"), ("adamw", "in bf16"), ("sgd", "warming up"), ("adamw", "warming up")]
)
def test_it_goes_with_clipping_16_bits_and_rates_that_change_and_on_another_plan(name, also, tmp_path):
    """To the bit, but for the order in which a norm's squares are summed. Rates rise over three updates, and are halved
    after every second of the others."""
    kind, rate = ("momentum", 0.5) if name == "sgd" else ("adam", 0.01)
    half, clip, scale = (torch.bfloat16, None, 1024.0) if also == "in bf16" else (None, None, 1.0)
    if also == "clipped":
        clip = 0.05  # below the norms of most updates
    chain = chain_of(exploding, 4, dtype=half, data=vectors)
    about = {"weights": "2bw", "accumulate": 6, "optimizer": kind}
    plans = [
        plan_of(chain, x, **about) for x in ([(0, 2, (0,)), (2, 4, (1,)), (4, 6, (2,))], [(0, 3, (0,)), (3, 6, (1,))])
    ]
    if half is not None:
        plans = [replace(x, policy=replace(x.policy, precision="mixed")) for x in plans]
    plans = [clipping(x, clip is not None) for x in plans]
    options = options_of(name, rate, steps=8, delay_correction="both", checkpoint=tmp_path / "c", save=tmp_path / "s")
    options = replace(options, seed=0, clip_norm=clip, half=HalfOptions(loss_scale=scale) if half else AS_PROFILED)
    if also == "warming up":
        options = replace(options, warmup=3, scheduler=Choice("StepLR", (("step_size", 2), ("gamma", 0.5))))
    model = ModelSpec("cases.half:exploding", "cases.runtime:vectors")
    losses = [*run_plan(plans[0], model, replace(options, steps=4)).losses]
    losses += run_plan(plans[1], model, replace(options, resume=True)).losses
    rates = [1 / 3, 2 / 3, 1, 1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4] if also == "warming up" else [1] * 9
    loop = Loop({}, name, [rate * x for x in rates], "both")
    expected, state = looped([(plans[0], 0, 4), (plans[1], 4, 8)], loop, half=half, clip=clip, scale=scale)
    near = 1e-6 if also == "clipped" else 0
    assert losses == pytest.approx(expected, abs=near)
    assert largest_difference(torch.load(tmp_path / "s"), state) <= near
    alone, _ = looped([(plans[0], 0, 8)], Loop({}, name, loop.rates, "none"), half=half, scale=scale)
    assert abs(alone[-1] - losses[-1]) > 1e-4


@pytest.mark.parametrize(("zero", "offload"), [(0, False), (1, False), (0, True)])
def test_a_checkpoint_has_the_weights_themselves(zero, offload, tmp_path):
    chain, model = chain_of(exploding, 4, data=vectors), ModelSpec("cases.half:exploding", "cases.runtime:vectors")
    plan = plan_of(chain, [(0, 3, (0, 1)), (3, 6, (2,))], weights="2bw", accumulate=4, optimizer="adam")
    plan = replace(plan, policy=replace(plan.policy, zero=zero, offload=offload, bucket_parameters=200))
    whole = options_of("adamw", 0.002, steps=5, delay_correction="both", checkpoint=tmp_path / "c", every=3)
    run_plan(plan, model, replace(whole, save=tmp_path / "whole"))
    rmtree(tmp_path / "c" / "step-00000005")
    run_plan(plan, model, replace(whole, resume=True, save=tmp_path / "two"))
    assert largest_difference(torch.load(tmp_path / "whole"), torch.load(tmp_path / "two")) == 0


def test_what_is_not_late_or_has_no_formula_is_left_alone(chain):
    spec = ModelSpec(GPT)
    drained = plan_of(chain, STAGES, optimizer="momentum", accumulate=4)
    job = job_of(drained, spec, RunOptions(steps=1, lr=0.1))
    assert (job.options.delay_correction, job.plan.policy.predict, job.notes) == ("none", False, ())
    plain = plan_of(chain, STAGES, weights="2bw", accumulate=6)
    assert job_of(plain, spec, RunOptions(steps=1, lr=0.1)).notes == ()
    late = plan_of(chain, STAGES, weights="2bw", optimizer="momentum", accumulate=6)
    nesterov = Choice("SGD", (("momentum", 0.9), ("nesterov", True)))
    job = job_of(late, spec, RunOptions(steps=1, lr=0.1, optimizer=nesterov))
    assert job.options.delay_correction == "none"
    assert job.notes == ("late gradients: SGD with these options isn't corrected",)
    with pytest.raises(BadInput, match=r"--delay-correction sc: it is for SGD with momentum"):
        job_of(late, spec, RunOptions(steps=1, lr=0.1, optimizer=nesterov, delay_correction="sc"))
    assert not correctable(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))


def test_weights_are_predicted_where_that_takes_no_memory_or_helps_or_is_asked_for(chain):
    spec, usual = ModelSpec(GPT), RunOptions(steps=1, lr=0.1)
    asked = replace(usual, delay_correction="both")
    plan = plan_of(chain, STAGES, weights="2bw", optimizer="momentum", accumulate=12)
    mixed = replace(plan, policy=replace(plan.policy, precision="mixed"))
    much = plan_of(chain, STAGES, weights="stash", optimizer="momentum")  # late by three updates
    kept = replace(much, policy=replace(much.policy, predict=True))
    cases = [(plan, usual, "both"), (mixed, usual, "both"), (plan, replace(usual, delay_correction="sc"), "sc")]
    cases += [(much, usual, "sc"), (much, asked, "both"), (kept, usual, "both")]
    cases += [(kept, replace(usual, delay_correction="sc"), "sc")]
    for found, options, correction in cases:
        job = job_of(found, spec, options)
        assert (job.options.delay_correction, job.plan.policy.predict) == (correction, correction == "both")
        assert job.notes == ()
    most = max(x.peak_bytes for x in evaluate(plan).devices)
    with pytest.raises(InvalidPlan, match="weights"):
        job_of(replace(plan, platform=Platform.flat(3, most)), spec, asked)
    job = job_of(replace(plan, platform=Platform.flat(3, most)), spec, usual)
    assert (job.options.delay_correction, job.plan.policy.predict) == ("sc", False)
    assert job.notes == (
        "late gradients: sc alone corrects them, as predicted weights don't fit (plan --predicted keeps room)",
    )
    newest = plan_of(chain, STAGES, weights="latest", optimizer="momentum", accumulate=6)
    newest = replace(newest, policy=replace(newest.policy, offload=True))
    assert job_of(newest, spec, usual).options.delay_correction == "sc"
    with pytest.raises(BadInput, match=r"--delay-correction predict: .*; sc goes"):
        job_of(newest, spec, replace(usual, delay_correction="predict"))
