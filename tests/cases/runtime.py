"""Plans for real runs of small models, models that fail on purpose, and plain training to compare with.

Importable by name, because ranks import what they train.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipeplan import zoo
from pipeplan.check.validate import check
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Chain, Platform, Policy
from pipeplan.runtime.measure.held_bytes import HeldBytes
from pipeplan.runtime.model.network import TensorSpec, chain_layers, chain_network, loss_layer, only
from pipeplan.runtime.model.pieces import Cut, pieces_of
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.saved import saved_values, sized_layers
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.runtime.training.optimizers import optimizer_maker
from pipeplan.runtime.training.stage import StageModule
from pipeplan.runtime.training.versions import Versions
from pipeplan.schedule.pattern import most_in_flight, starts_of
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.program import Step, unroll
from pipeplan.schedule.simulate import simulate


def chain_of(model, batch, *, measured=False, data=None, dtype=None):
    """The profile of a model; unless ``measured``, every layer takes 1 ms forward and 2 ms backward."""
    steps = {"steps": 5, "warmup": 2} if measured else {"steps": 1, "warmup": 0}
    options = MeasureOptions(dtype=dtype, **steps)
    chain = measure_model(model, batch, options, name="test", date="today", data=data).chain
    if measured:
        return chain
    layers = [replace(x, forward_ns=10**6, backward_ns=2 * 10**6, optimizer_ns=0) for x in chain.layers]
    layers[-1] = replace(layers[-1], forward_ns=10**5, backward_ns=10**5)
    return replace(chain, layers=tuple(layers))


def zoo_chain(name, batch, *, measured=False):
    model = zoo.load(name)
    return chain_of(model, batch, measured=measured, data=model.data(batch))


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


def spec(tensor):
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def chain_pieces(layers, loss, checkpoint, start=0):
    """The pieces of a stage of a chain, whose layers are called by their classes."""
    codes = chain_layers([(type(layer).__name__, layer) for layer in layers], start)
    stop = start + len(layers)
    if loss is not None:
        codes = (*codes, loss_layer(loss, (stop,), only))
    return pieces_of(start, [(code,) for code in codes], checkpoint, () if loss is not None else (stop,))


def chain_cut(position, crossing):
    """The cut before layer ``position`` of a chain."""
    return Cut((position,), (crossing,), (position,))


def stage_of(
    layers, x, *, loss=None, checkpoint=(), start=0, index=1, out=None, divisor=1, activations=None, passes=1000
):
    versions = Versions(layers, Counter({0: passes}), optimizer_maker("sgd", 0.1))
    stop = start + len(layers) + (loss is not None)
    return StageModule(
        index=index,
        pieces=chain_pieces(layers, loss, checkpoint, start),
        cuts=(chain_cut(start, spec(x)), None if loss is not None else chain_cut(stop, spec(out))),
        versions=versions,
        activations=activations or HeldBytes(),
        divisor=divisor,
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
    count = 1 + max(d for stage in made for d in stage.devices)
    platform = Platform.flat(count, 10**12)
    policy = Policy(weights=weights, accumulate=accumulate, optimizer=optimizer, vertical_sync=vertical_sync)
    graph = stage_graph(chain, platform, policy, made)
    loose = stage_graph(chain, platform, replace(policy, weights="flush"), made)
    pattern = best_one_f_one_b_star(loose) if graph.contiguous else schedule_ilp(loose).pattern
    assert pattern is not None
    if accumulate is None:
        accumulate = 1 if weights == "stash" else most_in_flight(graph, starts_of(pattern), pattern.period_ns)
        return plan_of(
            chain, stages, weights=weights, accumulate=accumulate, optimizer=optimizer, vertical_sync=vertical_sync
        )
    schedule = Schedule("flush", accumulate) if weights == "flush" else Schedule()
    plan = Plan(chain, platform, policy, Allocation(made), pattern, (), Provenance("by hand"), schedule)
    check(plan)
    return plan


def built(name, batch, seed):
    """The layers as one module, loss and data of a zoo model."""
    model = zoo.load(name)
    layers, _, loss = model(batch, seed=seed)
    return layers.train(), loss, model.data(batch)


def serial(name, batch, *, steps, accumulate, optimizer, lr, seed=0, version=None, cuts=()):
    """Train in one process; return (losses per microbatch, state).

    ``version(stage, microbatch)`` is how many updates the weights have had that a microbatch is run with, forward and
    backward, where stages begin at layer 0 and at ``cuts``; without it, all updates before its own mini-batch.
    """
    layers, loss, data = built(name, batch, seed)
    stage_of = {p: sum(i >= cut for cut in cuts) for i, layer in enumerate(layers) for p in layer.parameters()}
    parameters = list(layers.parameters())
    newest = [nn.Parameter(p.detach().clone()) for p in parameters]
    stepper = optimizer_maker(optimizer, lr)(newest)
    history = [[p.detach().clone() for p in newest]]
    losses = []
    for step in range(steps):
        layers.zero_grad()
        for m in range(step * accumulate, (step + 1) * accumulate):
            with torch.no_grad():
                for i, p in enumerate(parameters):
                    p.copy_(history[version(stage_of[p], m) if version else step][i])
            x, target = data(m, seed)
            value = loss(layers(x), target)
            losses.append(float(value.detach()))
            (value / accumulate).backward()
        for p, master in zip(parameters, newest, strict=True):
            master.grad = p.grad.clone()
        stepper.step()
        history.append([p.detach().clone() for p in newest])
    with torch.no_grad():
        for p, value in zip(parameters, history[-1], strict=True):
            p.copy_(value)
    return losses, layers.state_dict()


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
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


def undisturbed(measure, tries=6):
    """Measure, and again while what is asserted doesn't hold: others on the machine disturb some tries, not all."""
    for _ in range(tries - 1):
        try:
            return measure()
        except AssertionError:
            continue
    return measure()


# --- models that go wrong, each in its fourth layer ------------------------------------------------------------------


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


class BackwardFault(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no way back")


def raise_value_error(x):
    raise ValueError("a bad microbatch")


def kill_process(x):
    os.kill(os.getpid(), 9)


def never_return(x):
    while True:
        time.sleep(3600)


def run_out_of_backward(x):
    return BackwardFault.apply(x)


def shrink(x):
    return x[:1]


def faulty(fault, batch):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), Faulty(fault), nn.Linear(16, 16)]
    return layers, torch.zeros(batch, 16), nn.functional.mse_loss


def raising(batch):
    return faulty(raise_value_error, batch)


def killed(batch):
    return faulty(kill_process, batch)


def hanging(batch):
    return faulty(never_return, batch)


def backward_raising(batch):
    return faulty(run_out_of_backward, batch)


def shrinking(batch):
    return faulty(shrink, batch)


def healthy(batch):
    return faulty(torch.clone, batch)


def vectors(index, seed):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)


not_a_function = 3


# --- layers whose times are known, however busy the machine is -------------------------------------------------------

FORWARD_S, BACKWARD_S = 0.01, 0.02


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


def without_room(batch):
    """A model too large for the files that its process may write, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return without_limit(batch)


def without_limit(batch):
    return [nn.Linear(16, 2048), nn.Linear(2048, 16)], torch.zeros(batch, 16), mean_square


def rates_doubled(optimizer, times=1):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0 ** min(step, times))


class Tiring(torch.optim.SGD):
    """An optimizer with a fault in its third update."""

    def __init__(self, parameters, lr, killed=False):
        super().__init__(parameters, lr=lr)
        self.made, self.killed = 0, killed

    def step(self, closure=None):
        self.made += 1
        if self.made == 3:
            if self.killed:
                kill_process(None)
            raise ArithmeticError("no third time")
        return super().step(closure)


class BackwardKill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        kill_process(gradient)


def backward_killed(batch):
    return faulty(BackwardKill.apply, batch)


def ending(index, seed):
    if index >= 3:
        raise IndexError(f"there is no microbatch {index}")
    return vectors(index, seed)


# --- processes that are killed in the middle of something ------------------------------------------------------------


def kill_in(place, rank, calls):
    """Let the process of ``rank`` kill itself in its ``calls``-th call of ``place``, once its work is under way."""
    module, _, name = place.rpartition(":")
    owner = import_module(module)
    *owners, name = name.split(".")
    for part in owners:
        owner = getattr(owner, part)
    original, made = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        found = original(*args, **kwargs)
        if dist.is_initialized() and dist.get_rank() == rank:
            made[0] += 1
            if made[0] == calls:
                kill_process(None)
        return found

    setattr(owner, name, wrapped)


class KilledInWait:
    """What a receive returns; to wait for it is deadly."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        kill_process(None)


def wait_deadly(rank, calls):
    original, made = dist.irecv, [0]

    def wrapped(*args, **kwargs):
        made[0] += 1
        work = original(*args, **kwargs)
        return KilledInWait(work) if dist.get_rank() == rank and made[0] == calls else work

    dist.irecv = wrapped


PLACES = {
    "send": ("torch.distributed:isend", 5),
    "receive": ("torch.distributed:irecv", 6),
    "reduce": ("torch.distributed:all_to_all_single", 9),  # each sum has two, the second one in the update
    "gather": ("torch.distributed:all_to_all_single", 10),
    "write": ("torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data", 2),
    "metadata": ("torch.distributed.checkpoint.filesystem:FileSystemWriter.finish", 2),
    "list": ("shutil:rmtree", 4),  # of the second checkpoint, everything but the last renaming has been done
    "rename": ("os:replace", 2),
}


def deadly(place, rank):
    """Return what builds a model whose training is deadly for one rank."""

    def build(batch):
        if place == "wait":
            wait_deadly(rank, 5)
        else:
            where, calls = PLACES[place]
            kill_in(where, rank, calls)
        return healthy(batch)

    return build


for _place in (*PLACES, "wait"):
    for _rank in range(3):
        globals()[f"deadly_{_place}_{_rank}"] = deadly(_place, _rank)


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


def tied_anyhow(batch):
    """The same with weights that differ from process to process."""
    layers, x, loss = tied_writing(batch)
    with torch.no_grad():
        layers[0].weight.add_(os.getpid() % 101 / 1000)
    return layers, x, loss


# --- mixed precision -------------------------------------------------------------------------------------------------


class Explosion(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


class Exploding(nn.Module):
    """A linear layer whose gradient is infinite for microbatches that begin with 64."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        out = self.linear(x)
        return Explosion.apply(out) if float(x[0, 0]) == 64 else out


def exploding(batch):
    torch.manual_seed(2)
    layers = [Exploding(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16)]
    return layers, torch.zeros(batch, 16), mean_square


def exploding_vectors(index, seed):
    x, target = vectors(index, seed)
    if index in (4, 13):
        x[0, 0] = 64
    return x, target


def halved_serial(
    build, data, batch, *, dtype, steps, accumulate, optimizer, lr, scale, window, replicas=1, cut=0, scheduler=None
):
    """Train in mixed precision in one process; return (losses, state in full precision, skipped updates, last scale).

    Layers before ``cut`` have ``replicas``, whose gradients are added up in 32 bits in the order of the replicas.
    """
    layers, _, loss = build(batch)
    layers = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
    layers.train()
    masters = [nn.Parameter(p.detach().clone()) for p in layers.parameters()]
    first = {p: i for i, layer in reversed(list(enumerate(layers))) for p in layer.parameters()}
    counts = [replicas if first[p] < cut else 1 for p in layers.parameters()]
    layers.to(dtype)
    stepper = optimizer_maker(optimizer, lr)(masters)
    schedule = None if scheduler is None else scheduler(stepper)
    losses, skipped, good = [], [], 0
    for step in range(steps):
        parts = [
            [torch.zeros_like(p) for _ in range(count)] for p, count in zip(layers.parameters(), counts, strict=True)
        ]
        for m in range(step * accumulate, (step + 1) * accumulate):
            layers.zero_grad()
            x, target = data(m, 0)
            value = loss(layers(x.to(dtype) if x.is_floating_point() else x).float(), target)
            losses.append(float(value.detach()))
            value.backward(torch.tensor(scale / accumulate, dtype=torch.float64).to(value.dtype))
            for part, p in zip(parts, layers.parameters(), strict=True):
                part[m % len(part)] += p.grad
        largest = torch.finfo(dtype).max
        if any(not bool((x.abs() <= largest / len(part)).all()) for part in parts for x in part):
            skipped.append(step + 1)
            scale, good = scale / 2, 0
            continue
        for part, master in zip(parts, masters, strict=True):
            total = part[0].float()
            for x in part[1:]:
                total = total + x.float()
            master.grad = total.to(dtype).float() / scale
        stepper.step()
        if schedule is not None:
            schedule.step()
        good += 1
        if window and good == window:
            scale, good = scale * 2, 0
        with torch.no_grad():
            for p, master in zip(layers.parameters(), masters, strict=True):
                p.copy_(master)
    state = dict(layers.state_dict())
    state.update(zip((name for name, _ in layers.named_parameters()), (x.detach() for x in masters), strict=True))
    return losses, state, tuple(skipped), scale
