"""After which time has training with late gradients the loss of plain training? Updates times period, over flush's.

    python -m scripts.bench.time_to_loss FILE [--seconds S]

Six tasks without download (scikit-learn's digits: an MLP, a CNN, a vision transformer; the text that Python carries: an
MLP of characters, an LSTM, a GPT), each in four stages, with SGD (momentum 0.9) and with AdamW. A policy's versions,
delays and period are those of its own plan of 16 like layers on four GPUs; flush has the best drained schedule that
``plan`` finds. One process trains: of a stage's microbatches those that read the same version are one batch, which is
what ``run`` does but for rounding (tests/runtime/training/test_time_to_loss.py).

Plain training and some policies are tried at the same five rates with one seed. At the best one by the loss held out,
and the others at plain training's, they are trained with three seeds, those by default and plain training with eight. A
curve is the mean of the seeds' losses, smoothed over 20 updates. Plain training's level is what its own curve, of the
same seeds, stays below from 60% of the run on; a policy has it from the first update after which its curve stays below.
Last the CNN is trained for 1,000 updates. FILE keeps every run, so that it can be filled in parts. Wants scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby, product
from math import cos, exp, inf, isfinite, log, pi
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.check.evaluate import evaluate
from pipeplan.check.lateness import plan_delays
from pipeplan.plan import Plan
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem, Weights
from pipeplan.report.tables.run import SETTLED, smoothed, stays_below
from pipeplan.runtime.lowering.instructions import Forward
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.training.update.optimizers import compensated, delayed, predicted
from pipeplan.schedule.kinds import graph_of
from pipeplan.zoo.data import corpus
from pipeplan.zoo.model import mixed_seed
from scripts.checks.training_tasks import handwritten

STAGES, UPDATES, WINDOW = 4, 250, 20
LONG, LONG_UPDATES = "long ", 1000  # what goes before the name of the CNN where it makes so many
NEVER = 4.0  # what counts as the updates over plain training's where the level isn't reached
TRIALS = (1 / 8, 1 / 4, 1 / 2, 1, 2)  # times a task's usual rate
Samples = Callable[[int, int, int], tuple[Tensor, Tensor]]  # (first sample, how many, seed) -> input, target


# --- tasks ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """What ``inside`` makes of the normed input is added to it."""

    def __init__(self, width: int, inside: nn.Module) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(width), inside

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        return x + self.inside(self.norm(x))  # type: ignore[no-any-return]  # a tensor


class Attention(nn.Module):
    """Self-attention with four heads."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.causal = nn.Linear(width, 3 * width), nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.enter(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.leave(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a tensor


class Placed(nn.Module):
    """What ``inside`` makes of the input, with a vector for each place."""

    def __init__(self, inside: nn.Module, places: int, width: int) -> None:
        super().__init__()
        self.inside, self.places = inside, nn.Parameter(0.02 * torch.randn(places, width))

    def forward(self, x: Tensor) -> Tensor:
        """Embed."""
        return self.inside(x) + self.places  # type: ignore[no-any-return]  # a tensor


class Does(nn.Module):
    """A function as a layer."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        return self.does(x)


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, outputs, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Run over the sequence."""
        return self.lstm(x)[0]  # type: ignore[no-any-return]  # a tensor


def _dense(inputs: int, outputs: int) -> nn.Sequential:
    linear = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.ReLU())


def _blocks(width: int, causal: bool) -> list[nn.Module]:
    def mixing() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return [Residual(width, inside) for _ in range(3) for inside in (Attention(width, causal), mixing())]


def _mlp() -> list[nn.Module]:
    return [nn.Sequential(nn.Flatten(), _dense(64, 64)), *(_dense(64, 64) for _ in range(6)), nn.Linear(64, 10)]


def _cnn() -> list[nn.Module]:
    def convolution(inputs: int, outputs: int, *more: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), *more)

    last = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    pooled = convolution(16, 32, nn.MaxPool2d(2)), convolution(32, 32, nn.MaxPool2d(2), nn.Flatten())
    return [convolution(1, 16), *pooled, last]


def _vit() -> list[nn.Module]:
    patches = nn.Sequential(nn.Unfold(2, stride=2), Does(lambda x: x.transpose(1, 2)), nn.Linear(4, 24))
    head = nn.Sequential(nn.LayerNorm(24), Does(lambda x: x.mean(1)), nn.Linear(24, 10))
    return [Placed(patches, 16, 24), *_blocks(24, False), head]


def _charmlp() -> list[nn.Module]:
    def bent(inputs: int) -> nn.Sequential:
        linear = nn.Linear(inputs, 96)
        nn.init.xavier_normal_(linear.weight, nn.init.calculate_gain("tanh"))
        return nn.Sequential(linear, nn.Tanh())

    first = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), bent(128))
    return [first, *(bent(96) for _ in range(6)), nn.Linear(96, 128)]


def _head(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), Does(lambda x: x.transpose(1, 2)))


def _lstm() -> list[nn.Module]:
    return [nn.Embedding(128, 32), Recurrent(32, 64), Recurrent(64, 64), _head(64)]


def _gpt() -> list[nn.Module]:
    embedding = nn.Embedding(128, 32)
    nn.init.normal_(embedding.weight, std=0.02)
    return [Placed(embedding, 16, 32), *_blocks(32, True), _head(32)]


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures and digits to train on, and 397 that aren't."""
    x, y, more, others = handwritten()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(5))
    pictures, digits = torch.cat([x, more])[order], torch.cat([y, others])[order]
    return pictures[397:], digits[397:], pictures[:397], digits[:397]


@cache
def _order(epoch: int, seed: int) -> Tensor:
    return torch.randperm(1400, generator=torch.Generator().manual_seed(mixed_seed(seed, epoch)))


def _pictures(first: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    places = [int(_order(n // 1400, seed)[n % 1400]) for n in range(first, first + count)]
    return _digits()[0][places], _digits()[1][places]


def _windows(length: int, last_alone: bool, first: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Windows of the first nine tenths of the text, or with seed -1 of the last; targets are the next characters."""
    split = len(corpus()) * 9 // 10
    begin, room = (split, len(corpus()) - split) if seed < 0 else (0, split)
    starts = [begin + mixed_seed(seed, n) % (room - length - 1) for n in range(first, first + count)]
    found = torch.stack([corpus()[x : x + length + 1] for x in starts]).long()
    return found[:, :-1], found[:, -1] if last_alone else found[:, 1:]


@dataclass(frozen=True)
class Task:
    """Layers, made under torch's random state, samples, and how many make an update; ``unseen`` is held out.

    ``rates`` are usual ones of SGD and of AdamW.
    """

    layers: Callable[[], list[nn.Module]]
    samples: Samples
    batch: int
    unseen: Callable[[], tuple[Tensor, Tensor]]
    rates: Mapping[str, float]


def _seeing(layers: Callable[[], list[nn.Module]], sgd: float, adamw: float) -> Task:
    return Task(layers, _pictures, 32, lambda: _digits()[2:], {"sgd": sgd, "adamw": adamw})


def _reading(
    layers: Callable[[], list[nn.Module]], length: int, batch: int, sgd: float, adamw: float, last: bool = False
) -> Task:
    samples = partial(_windows, length, last)
    return Task(layers, samples, batch, partial(samples, 0, 1024 if last else 128, -1), {"sgd": sgd, "adamw": adamw})


TASKS = {
    "mlp": _seeing(_mlp, 0.0125, 0.002),
    "cnn": _seeing(_cnn, 0.05, 0.004),
    "vit": _seeing(_vit, 0.1, 0.004),
    "charmlp": _reading(_charmlp, 8, 64, 0.05, 0.002, last=True),
    "lstm": _reading(_lstm, 24, 16, 0.1, 0.016),
    "gpt": _reading(_gpt, 16, 16, 0.1, 0.004),
}


# --- policies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How an update of a whole batch is made, of so many microbatches, and what is done about late gradients."""

    weights: Weights
    microbatches: int
    correction: str = "none"

    def __str__(self) -> str:
        return f"{self.weights} {self.microbatches} {self.correction}"

    @property
    def plan(self) -> Plan:
        """Of 16 like layers on four GPUs, the last a little longer, as the loss is there."""
        return _plan(self.weights, self.microbatches)

    @property
    def update_ms(self) -> float:
        """The time of an update, whose batch takes the slowest of the four GPUs 12.12 ms."""
        return evaluate(self.plan).period_ns * self.plan.interval / 1e6


@cache
def _plan(weights: Weights, microbatches: int) -> Plan:
    unit = 10**6 // microbatches
    layer = Layer("like", unit, 2 * unit, 4000, 1000, saved_bytes=1000, parameters=1000, backward_weight_ns=unit)
    last = Layer("last", unit * 26 // 25, unit * 52 // 25, 4000, 0, saved_bytes=1000, backward_weight_ns=unit)
    policy = Policy(weights, microbatches, optimizer="momentum")
    chain, where = Chain("like", (*[layer] * 15, last), 1000), Platform.flat(STAGES, 10**12)
    return make_plan(Problem(chain, where, policy, replicas=False, checkpointing="none")).plan


PLAIN = Way("flush", 4)
USUAL = tuple(Way("2bw", 16, x) for x in ("both", "sc", "none"))  # four microbatches for each GPU, as by default
FRESH = Way("2bw", 4, "both")  # one for each GPU: gradients are four times as late
UNIFORM, PIPEDREAM, TIMEPREST = Way("2bw-uniform", 4), Way("stash", 1), Way("latest", 4)  # PipeDream: whole batches
TUNED = UNIFORM, PIPEDREAM, TIMEPREST
DEFAULTS = USUAL[0], FRESH  # as `run` corrects them, where nobody says
SEEDS, MANY = 3, 8
OFTEN = PLAIN, *DEFAULTS  # with as many seeds
SHORT = Way("2bw", 4, "none"), Way("2bw", 4, "sc")


# --- training -------------------------------------------------------------------------------------------------------

Reads = Mapping[tuple[int, int], int]  # (stage, microbatch) -> updates that the weights of its forward have had


def reads_of(plan: Plan, updates: int) -> Reads:
    """Return what forwards of ``plan`` read."""
    listings = lower_run(plan, updates).instructions
    return {(x.stage, x.microbatch): x.version for listing in listings for x in listing if isinstance(x, Forward)}


class Part:
    """A stage's layers, and copies of them that read other versions of the weights; the optimizer has ``masters``."""

    def __init__(self, layers: Sequence[nn.Module], delay: float) -> None:
        self.copies = [nn.Sequential(*layers)]
        self.masters = [delayed(nn.Parameter(p.detach().clone()), delay) for p in self.copies[0].parameters()]
        self.versions = [[x.detach().clone() for x in self.masters]]

    def run(self, x: Tensor, reads: Sequence[int]) -> Tensor:
        """Run as many microbatches as there are ``reads``, the versions before the newest of their weights."""
        runs = [(back, len(list(some))) for back, some in groupby(reads)]
        self.copies += [deepcopy(self.copies[0]) for _ in runs[len(self.copies) :]]
        given = x.split([len(x) // len(reads) * count for _, count in runs])
        return torch.cat([self._read(i, back)(given[i]) for i, (back, _) in enumerate(runs)])

    @torch.no_grad()
    def _read(self, copy: int, back: int) -> nn.Module:
        put(self.copies[copy], self.versions[-1 - back])
        return self.copies[copy]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the masters the sums of the copies' gradients."""
        for master, *found in zip(self.masters, *(copy.parameters() for copy in self.copies), strict=True):
            master.grad = sum((p.grad for p in found if p.grad is not None), torch.zeros_like(master))
            for p in found:
                p.grad = None

    def keep(self, weights: Iterable[Tensor]) -> None:
        """Let passes to come read ``weights`` as the newest version."""
        self.versions = [*self.versions[-2 * STAGES :], [x.detach().clone() for x in weights]]


@torch.no_grad()
def put(module: nn.Module, values: Sequence[Tensor]) -> None:
    """Let a module read ``values``, a backward whose forward has read others, too."""
    torch._foreach_copy_([p.data for p in module.parameters()], list(values))


def trained(
    stages: Sequence[Sequence[nn.Module]],
    loss: Callable[[Tensor, Tensor], Tensor],
    plan: Plan,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    correction: str,
    samples: Callable[[int, int], tuple[Tensor, Tensor]],
    rates: Sequence[float],
) -> Iterator[float]:
    """Yield each update's loss, an update for each of ``rates``; then the layers of ``stages`` have the weights.

    ``samples(first, count)`` are those of so many microbatches.
    """
    interval, drains = plan.interval, plan.policy.drains
    delays = [0.0] * len(stages) if drains else [x.mean for x in plan_delays(plan, graph_of(plan))]
    reads: Reads = {} if drains else reads_of(plan, len(rates))
    parts = [Part(layers, delay) for layers, delay in zip(stages, delays, strict=True)]
    optimizer = make([x for part in parts for x in part.masters])
    if any(delays) and correction in ("sc", "both"):
        optimizer = compensated(optimizer)
    (group,) = optimizer.param_groups
    ahead = any(delays) and correction in ("predict", "both")
    for update, rate in enumerate(rates):
        microbatches = range(update * interval, (update + 1) * interval)
        x, target = samples(microbatches.start, interval)
        for s, part in enumerate(parts):
            x = part.run(x, [update - reads.get((s, m), update) for m in microbatches])
        value = loss(x, target)
        for part in parts if plan.policy.weights == "latest" else ():
            for copy in part.copies:
                put(copy, [x.data for x in part.masters])
        value.backward()  # type: ignore[no-untyped-call]  # as torch has it
        yield value.item()
        group["lr"] = rate
        coming = rates[min(update + 1, len(rates) - 1)]
        for part in parts:
            part.take_gradients()
        optimizer.step()
        for part in parts:
            part.keep(predicted(optimizer, group, x, coming) if ahead else x for x in part.masters)
    for part in parts:
        put(part.copies[0], [x.data for x in part.masters])


def run(
    name: str, optimizer: str, rate: float, way: Way, seed: int, updates: int = UPDATES, cosine: bool = False
) -> dict[str, Any]:
    """Train a task; return its losses by update, and loss and accuracy of what is held out.

    ``cosine``: after a rise in the first tenth the rate falls along a cosine to 0.
    """
    task, plan = TASKS[name], way.plan
    torch.manual_seed(seed)
    layers = task.layers()
    each, rise = task.batch // plan.interval, updates // 10

    def make(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        if optimizer == "sgd":
            return torch.optim.SGD(weights, rate, momentum=0.9)
        return torch.optim.AdamW(weights, rate, weight_decay=0.01)

    def samples(first: int, count: int) -> tuple[Tensor, Tensor]:
        return task.samples(first * each, count * each, seed)

    rates = [rate] * updates
    if cosine:
        fallen = [0.5 + 0.5 * cos(pi * (t - rise) / (updates - rise)) for t in range(updates)]
        rates = [rate * min((t + 1) / rise, fallen[t]) if t < rise else rate * fallen[t] for t in range(updates)]
    at = [i * STAGES // len(layers) for i in range(len(layers))]
    stages = [[x for x, stage in zip(layers, at, strict=True) if stage == s] for s in range(STAGES)]
    if plan.policy.drains:  # its plan has other stages, to which nothing comes late either
        stages = [layers]
    losses: list[float] = []
    for loss in trained(stages, functional.cross_entropy, plan, make, way.correction, samples, rates):
        losses.append(round(loss, 4))
        if not isfinite(loss) or loss > 50:
            return {"losses": losses, "unseen": None, "right": 0.0}
    x, target = task.unseen()
    with torch.no_grad():
        out = nn.Sequential(*layers).eval()(x)
    unseen = float(functional.cross_entropy(out, target))
    right = float((out.argmax(1) == target).float().mean())
    return {"losses": losses, "unseen": round(unseen, 4) if isfinite(unseen) else None, "right": round(right, 4)}


# --- the comparison -------------------------------------------------------------------------------------------------

Key = tuple[str, str, float, str, int]  # task, optimizer, rate, way, seed


class Results:
    """What a file has: a line of JSON for each run."""

    def __init__(self, path: Path) -> None:
        self.path, self.runs = path, dict[Key, dict[str, Any]]()
        for line in path.read_text().splitlines() if path.exists() else ():
            found = json.loads(line)
            self.runs[tuple(found["key"])] = found

    def fill(self, seconds: float) -> None:
        """Run what there isn't yet, for so long."""
        end = time.monotonic() + seconds
        for name, optimizer, rate, way, seed in self._wanted():
            key = name, optimizer, rate, str(way), seed
            if key in self.runs:
                continue
            if time.monotonic() > end:
                return
            long = name.startswith(LONG)
            about = (LONG_UPDATES, True) if long else (UPDATES, False)
            self.runs[key] = {"key": key, **run(name.removeprefix(LONG), optimizer, rate, way, seed, *about)}
            with self.path.open("a") as file:
                file.write(json.dumps(self.runs[key]) + "\n")

    def _wanted(self) -> Iterator[tuple[str, str, float, Way, int]]:
        """Yield runs, those first whose results say what else is wanted."""
        cases = list(product(TASKS, ("sgd", "adamw")))
        for name, optimizer in cases:
            yield from self._tuned(name, optimizer, PLAIN)
        for count, ways in ((SEEDS, (*DEFAULTS, *USUAL, *SHORT)), (MANY, OFTEN)):
            for (name, optimizer), seed, way in product(cases, range(count), ways):
                yield name, optimizer, self.best(name, optimizer, PLAIN), way, seed
        for seed, way in product(range(SEEDS), (PLAIN, *DEFAULTS, UNIFORM)):
            yield f"{LONG}cnn", "sgd", TASKS["cnn"].rates["sgd"], way, seed
        for seeds, way, (name, optimizer) in product((1, SEEDS), TUNED, cases):
            yield from self._tuned(name, optimizer, way, seeds)

    def _tuned(
        self, name: str, optimizer: str, way: Way, seeds: int = SEEDS
    ) -> Iterator[tuple[str, str, float, Way, int]]:
        yield from ((name, optimizer, rate, way, 0) for rate in _rates(name, optimizer))
        yield from ((name, optimizer, self.best(name, optimizer, way), way, seed) for seed in range(1, seeds))

    def best(self, name: str, optimizer: str, way: Way) -> float:
        """Return the rate after which the first seed's loss held out is least."""
        return min(_rates(name, optimizer), key=lambda rate: self._unseen((name, optimizer, rate, str(way), 0)))

    def _unseen(self, key: Key) -> float:
        found = self.runs[key]["unseen"]
        return inf if found is None else float(found)  # type: ignore[arg-type]  # a number


def _rates(name: str, optimizer: str) -> list[float]:
    return [TASKS[name].rates[optimizer] * trial for trial in TRIALS]


# --- tables ---------------------------------------------------------------------------------------------------------


class Column:
    """What a table says of one way: at its own best rate, or at plain training's."""

    def __init__(self, results: Results, way: Way, tuned: bool) -> None:
        self.results, self.way, self.tuned = results, way, tuned
        self.ratios: list[float] = []
        self.within = 0

    def runs(self, name: str, optimizer: str) -> dict[int, Mapping[str, Any]]:
        """Return the runs of a task, by seed, as far as they are there."""
        try:
            rate = self.results.best(name, optimizer, self.way if self.tuned else PLAIN)
        except KeyError:
            return {}
        keys = ((name, optimizer, rate, str(self.way), seed) for seed in range(MANY))
        return {key[-1]: self.results.runs[key] for key in keys if key in self.results.runs}

    def unseen(self, name: str, optimizer: str) -> list[float]:
        """Return the losses held out."""
        return [inf if x["unseen"] is None else x["unseen"] for x in self.runs(name, optimizer).values()]

    def curve(self, name: str, optimizer: str, seeds: Iterable[int]) -> list[float]:
        """Return the mean of the seeds' losses, smoothed; endless from where one diverges."""
        runs = self.runs(name, optimizer)
        found = [[*runs[x]["losses"], *[inf] * (UPDATES - len(runs[x]["losses"]))] for x in seeds]
        return smoothed([fmean(some) for some in zip(*found, strict=True)], WINDOW)

    def cell(self, name: str, optimizer: str, plain: Column) -> str:
        """Return the mean loss held out, marked where it is above plain training's worst seed, and the updates that the
        level takes over plain training's."""
        own, others = self.unseen(name, optimizer), plain.unseen(name, optimizer)
        if not own or not others:
            return "-"
        seeds = self.runs(name, optimizer).keys() & plain.runs(name, optimizer).keys()
        usual = plain.curve(name, optimizer, seeds)
        level = max(usual[int(SETTLED * UPDATES) :])
        first, taken = stays_below(usual, level), stays_below(self.curve(name, optimizer, seeds), level)
        assert first is not None, "the level is its own"
        self.ratios.append(inf if taken is None else taken / first)
        self.within += fmean(own) <= max(others)
        return f"{fmean(own):.3f}{'' if fmean(own) <= max(others) else '!'} x{self.ratios[-1]:.2f}"


def print_tables(results: Results) -> None:
    """Print what there is: a row for each task and optimizer, a column for each way, and what periods make of it."""
    plain = Column(results, PLAIN, True)
    ways = *((x, False) for x in (*USUAL, *SHORT, FRESH)), *((x, True) for x in TUNED)
    columns = [Column(results, *way) for way in ways]
    titles = [f"{x.way}{', best rate' if x.tuned else ''}" for x in columns]
    print(f"| | plain | {' | '.join(titles)} |\n|---|--:|{'--:|' * len(columns)}")
    for optimizer, name in product(("sgd", "adamw"), TASKS):
        own = plain.unseen(name, optimizer)
        if own:
            cells = [x.cell(name, optimizer, plain) for x in columns]
            said = f"{fmean(own):.3f} ({min(own):.3f} to {max(own):.3f})"
            print(f"| {name} {optimizer} | {said} | {' | '.join(cells)} |")
    for title, x in zip(titles, columns, strict=True):
        if x.ratios:
            mean = exp(fmean(log(min(ratio, NEVER)) for ratio in x.ratios))
            period = x.way.update_ms / Way("flush", max(PLAIN.microbatches, x.way.microbatches)).update_ms
            said = f"{x.within} of {len(x.ratios)} within plain training's seeds, updates x{mean:.2f} in the mean"
            print(f"{title}: {said}, period x{period:.3f}: time x{mean * period:.2f}")

    for way in (PLAIN, *DEFAULTS, UNIFORM):
        keys = ((f"{LONG}cnn", "sgd", TASKS["cnn"].rates["sgd"], str(way), seed) for seed in range(SEEDS))
        right = [results.runs[key]["right"] for key in keys if key in results.runs]
        print(f"CNN, SGD, {LONG_UPDATES} updates, {way}: {', '.join(f'{x:.1%}' for x in right)} right")


def main() -> None:
    """Train, or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON lines of runs, which are added to")
    parser.add_argument("--seconds", type=float, default=inf, help="train for so long, and print what there is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(arguments.file)
    results.fill(arguments.seconds)
    print_tables(results)


if __name__ == "__main__":
    main()
