"""After which time has training with late gradients the loss of plain training? Updates times period, over flush's.

    python -m scripts.bench.time_to_loss FILE [--seconds S]

Six tasks without download (scikit-learn's digits: an MLP, a CNN, a vision transformer; the text that Python carries: an
MLP of characters, an LSTM, a GPT), each in four stages, with SGD (momentum 0.9) and with AdamW. A policy's versions,
delays and period are those of its own plan of 16 like layers on four GPUs; flush has the best drained schedule that
``plan`` finds. One process trains (``late_training``).

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import cos, exp, inf, isfinite, log, pi
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.check.evaluate import evaluate
from pipeplan.plan import Plan
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem, Weights
from pipeplan.report.tables.run import SETTLED, smoothed, stays_below
from scripts.bench.late_tasks import TASKS
from scripts.bench.late_training import STAGES, trained

UPDATES, WINDOW = 250, 20
LONG, LONG_UPDATES = "long ", 1000  # what goes before the name of the CNN where it makes so many
NEVER = 4.0  # what counts as the updates over plain training's where the level isn't reached
TRIALS = (1 / 8, 1 / 4, 1 / 2, 1, 2)  # times a task's usual rate


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
