"""What scripts/bench/late_training.py trains in one process is what a run of the same plan trains."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import built, plan_of, zoo_chain

from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.update.optimizers import Choice
from scripts.bench.late_training import trained

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16"
STAGES = [(0, 2, (0,)), (2, 4, (1,)), (4, 6, (2,))]
OPTIMIZERS = {
    "SGD": (Choice("SGD", (("momentum", 0.9),)), partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "AdamW": (Choice("AdamW", (("weight_decay", 0.01),)), partial(torch.optim.AdamW, lr=0.002, weight_decay=0.01)),
}


@pytest.mark.parametrize(
    ("weights", "accumulate", "optimizer", "correction", "near"),
    [
        ("2bw", 4, "SGD", "both", 1e-5),
        ("2bw", 4, "AdamW", "both", 1e-5),
        ("2bw", 6, "SGD", "sc", 1e-5),
        ("2bw-uniform", 6, "SGD", "none", 1e-5),
        ("stash", 1, "SGD", "none", 0),  # no microbatches are one batch here
        ("latest", 6, "SGD", "none", 1e-5),
        ("flush", 1, "AdamW", "both", 0),
    ],
)
def test_the_bench_trains_as_a_run_does(weights, accumulate, optimizer, correction, near):
    plan = plan_of(zoo_chain(GPT, 2), STAGES, weights=weights, accumulate=accumulate, optimizer="momentum")
    said, make = OPTIMIZERS[optimizer]
    rate = make.keywords["lr"]
    options = RunOptions(steps=6, lr=rate, seed=2, optimizer=said, delay_correction=correction, compares=False)
    losses = run_plan(plan, ModelSpec(GPT), options).step_losses
    layers, loss, data = built(GPT, 2, 2)

    def samples(first, count):
        inputs, targets = zip(*(data(m, 2) for m in range(first, first + count)), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    stages = [list(layers)[start:stop] for start, stop, _ in STAGES]
    found = list(trained(stages, loss, plan, make, correction, samples, [rate] * 6))
    assert losses == pytest.approx(found, abs=near)
