"""Myelin's Figure 8: the time to sum a gradient over replicas and step the optimizer, against the coarsening k.

    python -m scripts.studies.myelin.coarsening [--parameters N] [--replicas R] [--bucket B] [--fp32] [-o FILE]

R processes of this machine sum one gradient over gloo in chunks of k buckets and step Adam behind it, as a run does,
for k = 1, 2, 4, .. and all. Beside it the prediction of ``costs.overlapped_ns`` from what was measured alone: the
fixed and the proportional time of a sum, and the step of a bucket. The paper (NCCL, 12 billion parameters) finds k = 1
slower than no overlap, 2 and 4 best, and more again slower.

Wants a quiet machine with R cores to spare, and more for the sums, which gloo's threads copy; the load is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.cost.time_model import overlapped_ns
from pipeplan.problem import Policy
from pipeplan.runtime.exchange.collective import ChunkSum
from pipeplan.runtime.measure.recorder import Recorder
from pipeplan.runtime.model.build.loading import chain_model
from pipeplan.runtime.training.half import halved
from pipeplan.runtime.training.update.exchanges import Way
from pipeplan.runtime.training.update.factors import LossScale, Scaling
from pipeplan.runtime.training.update.optimizers import optimizer_maker
from pipeplan.runtime.training.update.stepper import Stepper, Stepping, stepper_kind
from pipeplan.runtime.training.update.update import StageUpdate, sums_of
from pipeplan.runtime.training.weights.gradients import Gradients
from pipeplan.runtime.training.weights.versions import Versions

WIDTH = 1000


@dataclass(frozen=True)
class Question:
    """What is measured: an update of ``parameters`` on so many ``replicas``, in buckets of ``bucket`` parameters."""

    parameters: int
    replicas: int
    bucket: int
    mixed: bool
    offload: bool
    rounds: int
    coarsenings: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """Medians in ns: of an update for each coarsening, of the sums of one bucket and of everything, of a step."""

    update_ns: dict[int, int]
    bucket_sum_ns: int
    whole_sum_ns: int
    step_ns: int


def stage_of(question: Question) -> tuple[Gradients, Stepper]:
    """Return the weights of a stage of linear layers, as a worker keeps them."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, question.parameters // WIDTH**2))]
    masters: dict[nn.Parameter, torch.Tensor] = {}
    if question.mixed:
        named = [(f"linear{i}", layer) for i, layer in enumerate(layers)]
        data = lambda index, seed: (torch.zeros(1), torch.zeros(1))  # noqa: E731
        model = chain_model(named, torch.zeros(1, WIDTH), nn.functional.mse_loss, data)
        _, masters = halved(model, torch.bfloat16, layers)
    gradients = Gradients(Versions(layers), flat=True)
    how = Stepping(question.bucket, question.offload)
    kind = stepper_kind(gradients.versions, how)
    return gradients, kind(gradients.versions, optimizer_maker("adam", 1e-3), None, how, masters)


def rank_main(question: Question, rank: int, store: str, results: Any) -> None:
    """Measure as one replica; rank 0 answers."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, question.replicas), rank=rank, world_size=question.replicas
    )
    group = dist.new_group(list(range(question.replicas)))
    gradients, stepper = stage_of(question)
    scaling = Scaling(LossScale(1.0, 0), None) if question.mixed else None
    (flat,) = gradients.summed.flats.values()

    def filled() -> None:
        flat.normal_()
        dist.barrier(group)

    def summed(size: int) -> int:
        times = []
        for _ in range(question.rounds):
            filled()
            start = time.monotonic_ns()
            chunk = ChunkSum(flat[:size], group)
            chunk.begin()
            chunk.turn()
            chunk.end()
            times.append(time.monotonic_ns() - start)
        return int(statistics.median(times))

    def updated(coarsening: int) -> int:
        exchange = sums_of(0, gradients, stepper, Recorder(), group, coarsening)
        update = StageUpdate(Way(exchange), Recorder(), scaling)
        times = []
        for version in range(question.rounds + 1):
            filled()
            start = time.monotonic_ns()
            update.reduce(version)
            update.update(version)
            times.append(time.monotonic_ns() - start)
        return int(statistics.median(times[1:]))  # the first one makes the state

    def stepped() -> int:
        times = []
        for version in range(question.rounds + 1):
            filled()
            start = time.monotonic_ns()
            StageUpdate(Way(sums_of(0, gradients, stepper, Recorder())), Recorder()).update(version)
            times.append((time.monotonic_ns() - start) // len(stepper.buckets))
        return int(statistics.median(times[1:]))

    answer = Answer(
        {k: updated(k) for k in question.coarsenings},
        summed(min(question.bucket, flat.numel())),
        summed(flat.numel()),
        stepped(),
    )
    dist.barrier(group)
    if rank == 0:
        results.put(answer)
    dist.destroy_process_group()


def predicted_ns(question: Question, answer: Answer, coarsening: int) -> int:
    """Return the modelled time of an update from the times of sums and steps alone."""
    rest = question.parameters - question.bucket
    slope = (answer.whole_sum_ns - answer.bucket_sum_ns) / rest if rest > 0 else 0.0
    fixed = max(0.0, answer.bucket_sum_ns - slope * question.bucket)
    chunks = -(-question.parameters // (coarsening * question.bucket))
    policy = Policy("flush", coarsening=coarsening, bucket_parameters=question.bucket)
    step_ns = round(answer.step_ns * question.parameters / question.bucket)
    return overlapped_ns(policy, round(chunks * fixed + slope * question.parameters), step_ns, question.parameters)


def measured(question: Question) -> Answer:
    """Return what the replicas measured, each a process."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_main, args=(question, rank, f"{folder}/store", results))
            for rank in range(question.replicas)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a replica failed")
        answer: Answer = results.get()
    return answer


def main() -> None:
    """Print one line for each coarsening, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=4 * 10**6, help="in millions of which one linear layer has 1")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--bucket", type=int, default=250_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fp32", action="store_true", help="instead of mixed precision")
    parser.add_argument("--no-offload", action="store_true", help="leave state where it is stepped")
    parser.add_argument("-o", "--output", metavar="FIGURE", help="draw the curves into this .svg, .png or .pdf")
    arguments = parser.parse_args()
    parameters = max(1, arguments.parameters // WIDTH**2) * WIDTH**2
    buckets = -(-parameters // arguments.bucket)
    coarsenings = [2**i for i in range(buckets.bit_length()) if 2**i < buckets] + [buckets]
    question = Question(
        parameters, arguments.replicas, arguments.bucket, not arguments.fp32, not arguments.no_offload,
        arguments.rounds, tuple(coarsenings),
    )  # fmt: skip
    answer = measured(question)
    print(f"{parameters:,} parameters, {arguments.replicas} replicas, {buckets} buckets; load {os.getloadavg()[0]:.1f}")
    print(
        f"alone: the sum of a bucket {answer.bucket_sum_ns / 1e6:.2f} ms, of all {answer.whole_sum_ns / 1e6:.2f} ms, "
        f"the step of a bucket {answer.step_ns / 1e6:.2f} ms"
    )
    print(f"{'k':>5} {'chunks':>7} {'measured ms':>12} {'predicted ms':>13}")
    predictions = {k: predicted_ns(question, answer, k) for k in coarsenings}
    for k in coarsenings:
        name = "all" if k == buckets else str(k)
        found = answer.update_ns[k]
        print(f"{name:>5} {-(-buckets // k):7} {found / 1e6:12.2f} {predictions[k] / 1e6:13.2f}")
    if arguments.output:
        draw(arguments.output, answer.update_ns, predictions)


def draw(path: str, found: dict[int, int], predictions: dict[int, int]) -> None:
    """Draw both curves."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for times, label in ((found, "measured"), (predictions, "predicted")):
        axes.plot(list(times), [ns / 1e6 for ns in times.values()], "o-", label=label)
    axes.set(xscale="log", xlabel="coarsening k (buckets in a chunk)", ylabel="sum and step, ms", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
