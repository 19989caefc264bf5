"""How good is the model, while it trains, on data that it doesn't train on? Forward alone, between two mini-batches.

The pipeline is empty then. The first replica of each stage runs all microbatches with the newest weights, or their
running average, as the module does in evaluation; what it trains on, its random numbers and statistics stay as they
are. Messages go through the hosts, in one order for all ranks, so that none waits for another in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import BadInput
from ..device import random_state, set_random_state, settle
from ..exchange.layer_group import LayerGroup
from ..exchange.transport import Group, everybodys, exchanging
from ..lowering.instructions import NOBODY
from ..measure.progress import Trial
from ..measure.recorder import HeldBytes
from ..model.build.spec import find
from ..model.contract import Span
from ..model.loaded import LoadedModel
from ..model.network import LOSS, LayerCode
from ..model.structure import mapped
from ..model.user_code import user_code
from ..training.rank import Rank
from ..training.repeatable import Draws
from ..training.state.state import assembled, averaged
from ..training.weights.gradients import Gradients
from ..training.weights.versions import Versions
from .job import Job, Launcher
from .own_stages import OwnStages, RankRun, runner_of
from .preparation import build_model
from .reading import reads_of


class HeldOut:
    """One rank's part in the evaluations of a run, and what has come of them: ``trial`` is the best so far.

    It is made before anything else, as building a model draws random numbers.
    """

    def __init__(self, job: Job, number: int, launcher: Launcher) -> None:
        asked = job.options.held_out
        assert asked is not None, "only then is anything evaluated"
        spec = replace(job.model, data=asked.data)
        forward = replace(job.options, evaluates=True, held_out=None, checkpoint=None, every=None, keep=None)
        self._rank, _, _ = build_model(Job(job.plan, spec, forward, place=job.place), number, launcher)
        self._asked, self._seed, self._averaged = asked, job.options.seed, job.options.averaged
        self._metrics: list[dict[str, float]] = []
        self._later: list[Callable[[], None]] = []  # what reads losses once they are there
        model = self._rank.model
        if asked.metrics is not None:
            model = _watched(model, find(asked.metrics), asked.metrics, self._metrics)
        weights = Gradients(Versions([]))  # weights are where they are used already
        about = Draws(self._seed, self._rank.device), weights, HeldBytes(), self._later.append, model
        self._runners = {s: runner_of(self._rank, s, *about) for s in self._rank.first_of}
        for module in (module for s in self._rank.first_of for module in self._rank.modules(s)):
            module.eval()
        self.trial = Trial()
        self.found: dict[int, Mapping[str, float]] = {}  # by update
        self.ends = False

    def judge(self, step: int, run: RankRun) -> tuple[Mapping[str, float], bool]:
        """Evaluate after ``step`` updates, all ranks together; return the means, and whether they are the best yet."""
        rank, stages, patient = run.rank, run.stages, run.meeting.patient
        kept, flags = random_state(rank.device), {}
        for s in rank.stages:
            for module in (part for root in rank.modules(s) for part in root.modules()):
                flags[module] = module.training
        run.meeting.recorder.settle()
        self._take_weights(rank, stages)
        means = self._run(patient, rank.together)
        for module, training in flags.items():
            module.training = training
        set_random_state(kept, rank.device)
        self.found[step] = means
        value, most = means.get(self._asked.watched), self._asked.highest
        if value is None:
            there = ", ".join(means)
            raise BadInput(f"--monitor: an evaluation gives {there}, and no {self._asked.watched!r}")
        self.trial, best = self.trial.after(step, -value if most else value)
        patience = self._asked.patience
        self.ends = patience is not None and self.trial.since >= patience
        for update in stages.updates.values():
            update.stepper.rates.observe(value)
        return means, best

    def _take_weights(self, rank: Rank, stages: OwnStages) -> None:
        """Let the modules that evaluate have the tensors of those that train, or averages."""
        with assembled(stages.updates):
            average = averaged(rank, stages.updates) if self._averaged else {}
            trained = [layer for s in rank.first_of for layer in rank.layers(s)]
            state = {
                layer.names[key]: x
                for layer in trained
                for key, x in layer.module.state_dict(keep_vars=True).items()
                if key in layer.names
            }
            for mine in (layer for s in rank.first_of for layer in self._rank.layers(s)):
                for key, x in mine.module.state_dict(keep_vars=True).items():
                    name = mine.names.get(key)
                    if name is None or name in rank.model.unused or not isinstance(x, Tensor):
                        continue
                    found = average.get(rank.model.first_names.get(name, name), state.get(name))
                    if not isinstance(found, Tensor):
                        raise BadInput(
                            f"model: in evaluation its layer {mine.name} has {name}, which another rank trains: its "
                            "operations come in another order then; evaluate it without a pipeline"
                        )
                    x.data = found.data.to(x.device, x.dtype)

    def _run(self, patient: Group, together: LayerGroup | None) -> Mapping[str, float]:
        lowered = self._rank.lowered
        last = len(lowered.plan.allocation.stages) - 1
        homes = [next(iter(lowered.ranks_of(s)), NOBODY) for s in range(last + 1)]
        mine = set(self._runners)
        reads = self._asked.count if any(runner.reads for runner in self._runners.values()) else 0
        data = self._rank.model.data
        samples = (data.enter(x.microbatch, x.given) for x in reads_of(data.source, Span(self._seed, 0, reads)))
        self._metrics.clear()
        for m in range(self._asked.count):
            given = next(samples, None)
            out: Tensor | None = None
            for s in sorted(mine):
                if s > 0 and homes[s - 1] != self._rank.number:
                    out = self._received(s, homes[s - 1], patient)
                    if together is not None and lowered.width_of(s - 1) < lowered.width_of(s):
                        out = together.of_first(out)
                runner = self._runners[s]
                inputs, target = mapped(lambda x: x.to(self._rank.device), given) if given else ((), None)
                out = runner.evaluate(m, 0, out, target if runner.takes_targets else None, inputs=inputs)
                if s < last and homes[s + 1] not in (self._rank.number, NOBODY):
                    sent = out.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                    with exchanging("an evaluation"):
                        dist.send(sent, homes[s + 1], patient, tag=s)
        means: dict[str, float] = {}
        settle(self._rank.device)
        while self._later:
            self._later.pop()()
        if last in mine:
            losses = self._runners[last].losses
            means["loss"] = fmean(losses[m] for m in range(self._asked.count))
            for name in dict.fromkeys(name for one in self._metrics for name in one):
                means[name] = fmean(one[name] for one in self._metrics if name in one)
        with exchanging("an evaluation"):
            found = everybodys(means, patient)
        return found[homes[last]] if together is None else together.told(found[max(0, homes[last])])

    def _received(self, stage: int, source: int, patient: Group) -> Tensor:
        spec = self._rank.model.cut(self._rank.stage(stage).start).forward
        came = torch.empty(spec.nbytes, dtype=torch.uint8)
        with exchanging("an evaluation"):
            if source != NOBODY:
                dist.recv(came, source, patient, tag=stage - 1)
        return came.view(spec.dtype).reshape(spec.shape).to(self._rank.device)


def _watched(model: LoadedModel, metrics: Callable[..., Any], name: str, found: list[dict[str, float]]) -> LoadedModel:
    """Return ``model`` whose outputs and targets ``metrics`` sees as well; what it says goes to ``found``."""

    def watching(code: LayerCode) -> LayerCode:
        if LOSS not in code.makes:
            return code
        structure = getattr(code.run, "structure", None)
        if structure is None:
            raise BadInput(f"--metrics {name}: the model returns its loss itself, so there is no output to look at")

        def run(module: Any, *values: Any) -> Any:
            with user_code(f"--metrics {name}"), torch.no_grad():
                said = metrics(structure(values[:-1]), values[-1])
                said = said if isinstance(said, Mapping) else {name.rpartition(":")[2]: said}
                found.append({key: float(value) for key, value in said.items()})
            return code.run(module, *values)

        return replace(code, run=run)

    *others, last = model.layers
    return replace(model, layers=(*others, replace(last, codes=tuple(map(watching, last.codes)))))
