"""Plans for real runs of small models, and plain training to compare with. Ranks import what they train by name."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from multiprocessing import current_process
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipeplan import zoo
from pipeplan.check.validate import check
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Chain, Platform, Policy
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.lowering.instructions import Backward, Forward, Update
from pipeplan.runtime.lowering.lowered_run import Position, lower_run
from pipeplan.runtime.measure.recorder import HeldBytes, Recorder
from pipeplan.runtime.model.network import Network, TensorSpec, chain_layers, chain_network, loss_layer, only
from pipeplan.runtime.model.pieces import Cut, pieces_of
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.saved import saved_values, sized_layers
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.runtime.training.stage import StageModule
from pipeplan.runtime.training.update.exchanges import Way
from pipeplan.runtime.training.update.optimizers import optimizer_maker
from pipeplan.runtime.training.update.stepper import Stepping, stepper_kind
from pipeplan.runtime.training.update.update import StageUpdate, sums_of
from pipeplan.runtime.training.weights.gradients import Gradients
from pipeplan.runtime.training.weights.versions import Versions
from pipeplan.schedule.pattern import most_in_flight, starts_of
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.program import Step, unroll
from pipeplan.schedule.simulate import simulate

uncorrected = partial(RunOptions, delay_correction="none")  # of late gradients, as serial loops train


@cache
def chain_of(model, batch, *, data=None, dtype=None, autocast=None, split=False):
    """The profile of a model, in which every layer takes 1 ms forward and 2 ms backward."""
    options = MeasureOptions(dtype=dtype, autocast=autocast, split_backward=split, steps=1, warmup=0)
    chain = measure_model(model, batch, options, name="test", date="today", data=data).chain
    times = {"forward_ns": 10**6, "backward_ns": 2 * 10**6, "backward_weight_ns": 10**6 if split else None}
    layers = [replace(x, **times, optimizer_ns=0) for x in chain.layers]
    layers[-1] = replace(layers[-1], forward_ns=10**5, backward_ns=10**5, backward_weight_ns=None)
    return replace(chain, layers=tuple(layers))


@cache
def zoo_chain(name, batch, *, split=False):
    model = zoo.load(name)
    return chain_of(model, batch, data=model.data(batch), split=split)


def network_of(layers, x, loss, target):
    """The network of a chain of layers, its loss included."""
    return chain_network(layers, x).with_loss(loss, target.detach().clone())


def sized_chain(layers, x, loss, target):
    """The profile of a chain of layers, without times: all its sizes."""
    network = network_of(layers, x, loss, target)
    return Chain("sizes", tuple(sized_layers(network, *saved_values(network, str(x.device)))), x.nbytes)


def whole_saved_bytes(layers, x, target, loss):
    """What one plain forward of the whole model saves, parameters and buffers aside."""
    permanent = {t.untyped_storage()._cdata for t in [*layers.parameters(), *layers.buffers()]}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(layers(x), target)
    assert value.requires_grad
    return sum(storage.nbytes() for key, storage in storages.items() if key not in permanent)


def backwards(does):
    """The identity, whose backward ``does`` something with the gradient."""

    class Doing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return does(gradient)

    return Doing.apply


class Whole(nn.Module):
    """A chain as one module, so that it is traced."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


def spec(tensor):
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def chain_pieces(layers, loss, checkpoint, start=0, apart=False):
    """The pieces of a stage of a chain, whose layers are called by their classes."""
    codes = chain_layers([(type(layer).__name__, layer) for layer in layers], start)
    stop = start + len(layers)
    if loss is not None:
        codes = (*codes, loss_layer(Network(codes, (), (stop,), only, chain=True), loss))
    return pieces_of(start, [(code,) for code in codes], checkpoint, () if loss is not None else (stop,), apart)


def chain_cut(position, crossing):
    """The cut before layer ``position`` of a chain."""
    return Cut((position,), (crossing,), (position,))


def update_of(gradients, optimizer, lr, masters=None, **how):
    """What updates the weights of a stage by itself."""
    how = Stepping(**how)
    kind = stepper_kind(gradients.versions, how)
    stepper = kind(gradients.versions, optimizer_maker(optimizer, lr), how=how, masters=masters)
    recorder = Recorder()
    return StageUpdate(Way(sums_of(0, gradients, stepper, recorder)), recorder)


def stage_of(
    layers,
    x,
    *,
    loss=None,
    checkpoint=(),
    start=0,
    index=1,
    out=None,
    divisor=1,
    activations=None,
    passes=1000,
    kind=StageModule,
    waiting=None,
):
    gradients = Gradients(Versions(layers, {0: passes}))
    stop = start + len(layers) + (loss is not None)
    return kind(
        index=index,
        pieces=chain_pieces(layers, loss, checkpoint, start, waiting is not None),
        cuts=(chain_cut(start, spec(x)), None if loss is not None else chain_cut(stop, spec(out))),
        gradients=gradients,
        activations=activations or HeldBytes(),
        divisor=divisor,
        waiting=waiting,
    )


def plan_of(
    chain: Chain,
    stages: list[tuple[int, int, tuple[int, ...]] | Stage],
    *,
    weights="flush",
    accumulate=None,
    optimizer="sgd",
    vertical_sync=False,
) -> Plan:
    """A valid plan with the 1F1B* pattern, or the integer program's where stages share devices."""
    made = tuple(x if isinstance(x, Stage) else Stage(*x) for x in stages)
    count = 1 + max(d for stage in made for d in stage.members)
    platform = Platform.flat(count, 10**12)
    chosen, enough = accumulate is None, False
    while not enough:  # another interval may be best in another order, which may hold more
        policy = Policy(weights=weights, accumulate=accumulate, optimizer=optimizer, vertical_sync=vertical_sync)
        graph = stage_graph(chain, platform, policy, made)
        loose = stage_graph(chain, platform, replace(policy, weights="flush" if policy.drains else "latest"), made)
        pattern = best_one_f_one_b_star(loose) if graph.contiguous else schedule_ilp(loose).pattern
        assert pattern is not None
        least = 1 if weights == "stash" else most_in_flight(graph, starts_of(pattern), pattern.period_ns)
        enough = not chosen or (accumulate or 0) >= least
        accumulate = accumulate if enough else least
    schedule = Schedule("flush", accumulate) if weights == "flush" else Schedule()
    plan = Plan(chain, platform, policy, Allocation(made), pattern, (), Provenance("by hand"), schedule)
    check(plan)
    return plan


def built(name, batch, seed):
    """The layers as one module, loss and data of a zoo model."""
    model = zoo.load(name)
    layers, _, loss = model(batch, seed=seed)
    return layers.train(), loss, model.data(batch)


def serial(
    name,
    batch,
    *,
    steps,
    accumulate,
    optimizer,
    lr,
    seed=0,
    version=None,
    cuts=(),
    clip=None,
    stepping=None,
    norms=None,
    replicas=1,
):
    """Train in one process; return (losses per microbatch, state).

    ``version(stage, microbatch)`` is how many updates the weights have had that a microbatch is run with, forward and
    backward, where stages begin at layer 0 and at ``cuts``; without it, all updates before its own mini-batch.
    Each of ``replicas`` adds up the gradients of its own microbatches; they are summed in the replicas' order.
    ``clip`` is the total norm that gradients are clipped to by torch, and what they had before is added to ``norms``;
    ``stepping(named weights)`` gives an optimizer, and its schedule, instead of ours.
    """
    layers, loss, data = built(name, batch, seed)
    parts = layers if isinstance(layers, nn.Sequential) else [layers]
    stage_of = {p: sum(i >= cut for cut in cuts) for i, layer in enumerate(parts) for p in layer.parameters()}
    parameters = list(layers.parameters())
    newest = [nn.Parameter(p.detach().clone()) for p in parameters]
    names = [name for name, _ in layers.named_parameters()]
    stepper, schedule = (optimizer_maker(optimizer, lr)(newest), None) if stepping is None else (None, None)
    if stepping is not None:
        stepper, schedule = stepping(list(zip(names, newest, strict=True)))
    history = [[p.detach().clone() for p in newest]]
    losses = {}
    for step in range(steps):
        layers.zero_grad()
        added = None  # of the replicas before
        for m in sorted(range(step * accumulate, (step + 1) * accumulate), key=lambda m: m % replicas):
            if m % replicas and m - m % replicas == step * accumulate:
                added = [p.grad + (0 if added is None else added[i]) for i, p in enumerate(parameters)]
                layers.zero_grad()
            with torch.no_grad():
                for i, p in enumerate(parameters):
                    p.copy_(history[version(stage_of[p], m) if version else step][i])
            x, target = data(m, seed)
            value = loss(layers(*x) if isinstance(x, tuple) else layers(x), target)
            losses[m] = float(value.detach())
            (value / accumulate).backward()
        for i, (p, master) in enumerate(zip(parameters, newest, strict=True)):
            master.grad = p.grad.clone() if added is None else added[i] + p.grad
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(newest, clip)
            if norms is not None:
                norms.append(float(norm))
        stepper.step()
        if schedule is not None:
            schedule.step()
        history.append([p.detach().clone() for p in newest])
    with torch.no_grad():
        for p, value in zip(parameters, history[-1], strict=True):
            p.copy_(value)
    return [losses[m] for m in sorted(losses)], layers.state_dict()


def emulated(plan, name, batch, *, steps, optimizer, lr, seed=0, late=None, first=0, before=None):
    """Train in one process by a plan without replicas and with all uses of a weight on one device, pass by pass in the
    order of its ranks; return (losses per microbatch, state).

    A weight belongs to the first stage that uses it, which makes version j + 1 of it from all gradients of mini-batch
    j. Under stash a pass takes the newest version there is, and its backward the same one; under latest both take the
    newest, the backward with the forward's activations; under 2bw-uniform both take that before the mini-batch's own,
    under 2bw what the instructions say. ``late(weights, stage)`` steps them instead, and its ``read`` gives what passes
    read of one. It begins behind ``first`` updates, with the weights ``before``.
    """
    layers, loss, data = built(name, batch, seed)
    layers.load_state_dict(before or layers.state_dict())
    stages, weights, interval = plan.allocation.stages, plan.policy.weights, plan.interval
    parts = [nn.Sequential(*list(layers)[stage.start : stage.stop]) for stage in stages]
    names = [dict(part.named_parameters(remove_duplicate=False)) for part in parts]
    home = {p: s for s in reversed(range(len(parts))) for p in names[s].values()}
    history = {p: [None] * first + [p.detach().clone()] for p in home}
    newest = {p: nn.Parameter(p.detach().clone()) for p in layers.parameters()}
    own = [[p for p in newest if home[p] == s] for s in range(len(parts))]
    make = late or (lambda found, _: optimizer_maker(optimizer, lr)(found))
    steppers = [make([newest[p] for p in some], s) if some else None for s, some in enumerate(own)]
    made, gradients = [first] * len(parts), {}
    inside, passed, back, losses = {}, {}, {}, {}

    def version(p, x):
        if weights == "2bw":
            return dict(x.lent).get(home[p], x.version)
        return max(x.microbatch // interval - 1, 0) if weights == "2bw-uniform" else made[home[p]]

    def ready(x):
        match x:
            case Forward(s, m):
                made_there = weights != "2bw" or all(version(p, x) < len(history[p]) for p in names[s].values())
                return (s == 0 or (s - 1, m) in passed) and made_there
            case Backward(s, m):
                return s == len(parts) - 1 or (s + 1, m) in back
        return True

    def carry_out(x):
        match x:
            case Forward(s, m):
                sample, target = data(m, seed)
                entered = passed.pop((s - 1, m)).requires_grad_() if s else sample
                leaves = {p: p if weights == "latest" else history[p][version(p, x)] for p in names[s].values()}
                leaves = {p: x if x is p else x.clone().requires_grad_() for p, x in leaves.items()}
                for p in leaves if weights == "latest" else ():
                    p.data.copy_(history[p][made[home[p]]])
                out = torch.func.functional_call(parts[s], {k: leaves[p] for k, p in names[s].items()}, (entered,))
                if s == len(parts) - 1:
                    out = loss(out, target)
                    losses[m] = float(out.detach())
                for p in leaves if weights == "latest" else ():
                    p.data.copy_(newest[p].data)
                inside[s, m], passed[s, m] = (entered, leaves, out), out.detach()
            case Backward(s, m):
                entered, leaves, out = inside.pop((s, m))
                start = back.pop((s + 1, m)) if s < len(parts) - 1 else torch.tensor(1 / interval)
                wanted = [*leaves.values(), *([entered] if s else [])]
                found = torch.autograd.grad(out, wanted, start)
                for p, gradient in zip(leaves, found, strict=False):
                    due = gradients.setdefault((p, m // interval), [])
                    due[:] = [due[0] + gradient] if due else [gradient]
                if s:
                    back[s, m] = found[-1]
            case Update(s):
                for p in own[s]:
                    (newest[p].grad,) = gradients.pop((p, made[s]))
                if own[s]:
                    steppers[s].step()
                made[s] += 1
                for p in own[s]:
                    read = steppers[s].read(newest[p]) if late else newest[p]
                    history[p].append(read.detach().clone())
                    p.data.copy_(newest[p].data)

    listings = [list(x) for x in lower_run(plan, steps, first=Position(first, first * interval)).instructions]
    while any(listings):
        for listing in listings:
            while listing and ready(listing[0]):
                carry_out(listing.pop(0))
    return [losses[m] for m in sorted(losses)], layers.state_dict()


def lowered_version(plan, steps):
    """The version that each pass is told to use: (stage, microbatch) -> int."""
    passes = (x for listing in lower_run(plan, steps).instructions for x in listing if isinstance(x, Forward))
    told = {(x.stage, x.microbatch): x.version for x in passes}
    return lambda stage, microbatch: told[stage, microbatch]


def simulated_version(plan, microbatches, vertical_sync=False):
    """The version that weight stashing uses, told from the simulated run: (stage, microbatch) -> int.

    An update counts from when its mini-batch's last backward starts; only a stage's other replicas can tell that from
    when it ends, and they wait for it.
    """
    graph = stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
    interval = plan.policy.update_interval(max(stage.replicas for stage in plan.allocation.stages))
    timeline = simulate(unroll(graph, plan.pattern, microbatches))

    def begin(kind, stage, m):
        step = Step(m, graph.position[kind, stage])
        return timeline.begin_ns(step), graph.operations[step.position].duration_ns, step

    def version(stage, microbatch):
        stage = 0 if vertical_sync else stage
        batches = (range(j, j + interval) for j in range(0, microbatches, interval))
        return sum(max(begin("B", stage, m) for m in batch) < begin("F", stage, microbatch) for batch in batches)

    return version


def largest_difference(one, other):
    """Over all entries of two states, which must have the same keys."""
    assert one.keys() == other.keys()
    exact = {k: (x, other[k]) if x.is_complex() else (x.double(), other[k].double()) for k, x in one.items()}
    return max(float((x - y).abs().max()) for x, y in exact.values())


def undisturbed(measure, tries=6):
    """Measure, and again while what is asserted doesn't hold: others on the machine disturb some tries, not all."""
    for _ in range(tries - 1):
        try:
            return measure()
        except AssertionError:
            continue
    return measure()


# --- models and data -------------------------------------------------------------------------------------------------


class Faulty(nn.Module):
    """A linear layer with a fault when it trains for the fifth time."""

    def __init__(self, fault, width=16):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.fault = fault
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls == 5:
                x = self.fault(x)
        return self.linear(x)


def faulty(fault, batch):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), Faulty(fault), nn.Linear(16, 16)]
    return layers, torch.zeros(batch, 16), nn.functional.mse_loss


def healthy(batch):
    return faulty(torch.clone, batch)


def vectors(index, seed):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)


def vectors_of_this_rank(index, seed):
    """As of a file that each node has another version of."""
    x, y = vectors(index, seed)
    return x, y + float(current_process().name[-1])


class Waved(nn.Module):
    """A linear layer and a wave of it, with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.height = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x):
        return torch.sin(self.linear(x)) * self.height + x


def waved(batch):
    torch.manual_seed(8)
    return [Waved(), nn.LayerNorm(16), Waved(), nn.Linear(16, 16)], torch.zeros(batch, 16), mean_square


def waved_whole(batch):
    layers, x, loss = waved(batch)
    return Whole(nn.Sequential(*layers)), x, loss


not_a_function = 3

FORWARD_S, BACKWARD_S = 0.01, 0.02  # of a layer whose times are known, however busy the machine is


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD_S)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S)
        return gradient


class Pausing(nn.Module):
    """A linear layer that takes its time but no processor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return Pause.apply(self.linear(x)) if self.training else self.linear(x)


def pausing(batch):
    return [Pausing() for _ in range(4)], torch.zeros(batch, 16), nn.functional.mse_loss


class Announcing(nn.Module):
    """A linear layer that prints its process's number when it first trains, and takes its time, to be interrupted."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.announced = False

    def forward(self, x):
        if self.training and not self.announced:
            self.announced = True
            os.write(1, f"{os.getpid()}\n".encode())
        time.sleep(0.002)
        return self.linear(x)


def announcing(batch):
    return [Announcing(), nn.Linear(16, 16), Announcing(), nn.Linear(16, 16)], torch.zeros(batch, 16), mean_square


class Versioned(nn.Linear):
    """A linear layer whose state says of what version it is, and which takes no other's."""

    _version = 7

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if metadata.get("version") != self._version:
            raise ValueError(f"a state of version {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *others)


def versioned(batch):
    layers = [nn.Linear(16, 16), nn.Sequential(nn.Tanh(), Versioned(16, 16))]
    return layers, torch.zeros(batch, 16), mean_square


def versioned_whole(batch):
    layers, x, loss = versioned(batch)
    return Whole(nn.Sequential(*layers)), x, loss


def mean_square(output, target):
    return nn.functional.mse_loss(output, target)


def dropping(batch):
    """Layers with randomness, statistics, and a frozen weight."""
    torch.manual_seed(3)
    layers = [
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)),
        nn.BatchNorm1d(16),
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)),
        nn.Linear(16, 16),
    ]
    layers[1].bias.requires_grad_(False)
    return layers, torch.zeros(batch, 16), mean_square


class Shifted(nn.Module):
    """Its evaluation leaves out a product, so that the one behind it has the other's name."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.one, self.two = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        return nn.functional.linear(nn.functional.linear(x, self.one) if self.training else x, self.two)


def shifted(batch):
    torch.manual_seed(9)
    return Shifted(), torch.zeros(batch, 16), mean_square


def dropping_whole(batch):
    layers, x, loss = dropping(batch)
    return Whole(nn.Sequential(*layers)), x, loss


def held_out(index, seed):
    return vectors(1000 + index, seed)


def absolute_error(output, target):
    return (output - target).abs().mean()


def drawn(index, seed):
    """Samples of torch's own random numbers, wherever they stand."""
    return torch.randn(4, 16), torch.randn(4, 16)


def without_limit(batch):
    return [nn.Linear(16, 2048), nn.Linear(2048, 16)], torch.zeros(batch, 16), mean_square


def two_rates(named):
    """The embedding's weights at another rate, and one group that some stages have nothing of."""
    named = list(named)
    first = [(name, p) for name, p in named if name.startswith("embedding")]
    others = [(name, p) for name, p in named if not name.startswith("embedding")]
    return [{"params": first, "lr": 0.005}, {"params": others}]


def half_a_group(named):
    return [{"params": [p for _, p in list(named)[1:]]}]


def rates_doubled(optimizer, times=1):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0 ** min(step, times))


# --- weights that layers share ---------------------------------------------------------------------------------------


class Writing(nn.Linear):
    """A linear layer that writes a digest of its weight to a file of its own whenever it trains."""

    def forward(self, x):
        if self.training:
            with Path(f"copy-{os.getpid()}-{id(self)}").open("a") as file:
                file.write(sha256(self.weight.detach().numpy().tobytes()).hexdigest() + "\n")
        return super().forward(x)


def tied_writing(batch):
    torch.manual_seed(4)
    layers = [Writing(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), Writing(16, 16)]
    layers[4].weight = layers[0].weight
    return layers, torch.zeros(batch, 16), mean_square


def four_tied(batch):
    torch.manual_seed(5)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    for i in (2, 4, 6):
        layers[i].weight = layers[0].weight
    return layers, torch.zeros(batch, 16), mean_square


def tied_in_the_middle(batch):
    """Its middle layer shares one weight with the first, and another one with the last."""
    torch.manual_seed(6)
    first, one, other, last = (nn.Linear(16, 16) for _ in range(4))
    one.weight, other.weight = first.weight, last.weight
    return [first, nn.Sequential(nn.Tanh(), one, nn.Tanh(), other), last], torch.zeros(batch, 16), mean_square


def tied_anyhow(batch):
    """The same with weights that differ from process to process."""
    layers, x, loss = tied_writing(batch)
    with torch.no_grad():
        layers[0].weight.add_(os.getpid() % 101 / 1000)
    return layers, x, loss
