"""Exchanges as between GPUs, and between machines.

Over gloo between CPUs: it takes the untagged messages of a pair in their order, as NCCL does.
"""

import traceback
from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from cases.patience import SECONDS
from cases.runtime import built, largest_difference, plan_of, serial, uncorrected, zoo_chain

from pipeplan.runtime.engine import preparation
from pipeplan.runtime.engine.job import Job, Launcher
from pipeplan.runtime.engine.phases import run_rank
from pipeplan.runtime.exchange.collective import replica_groups
from pipeplan.runtime.exchange.links import open_links
from pipeplan.runtime.lowering.instructions import Receive, Reduce, Send, Update
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.own_processes import context_of

BATCH, STEPS, LR = 4, 3, 0.05
BACK_AND_FORTH = [(0, 2, (0,)), (2, 4, (1,)), (4, 5, (0,)), (5, 6, (1,))]  # two edges each way between the two ranks
PLANS = {
    "one edge each way": ([(0, 3, (0,)), (3, 6, (1,))], "flush", 4),
    "two edges each way": (BACK_AND_FORTH, "flush", 4),
    "two edges each way, never drained": (BACK_AND_FORTH, "2bw", 6),
    "three ranks": ([(0, 2, (0,)), (2, 4, (1,)), (4, 6, (2,))], "2bw", 4),
    "replicas": ([(0, 3, (0, 1)), (3, 6, (2,))], "flush", 4),
}


def plan_named(name):
    stages, weights, accumulate = PLANS[name]
    return plan_of(zoo_chain("small-cnn", BATCH), stages, weights=weights, accumulate=accumulate)


@pytest.mark.parametrize("name", PLANS)
def test_both_ends_of_a_pair_issue_in_the_same_order(name):
    """And nothing would deadlock if every message and sum blocked its ranks until all had come."""
    script = lower_run(plan_named(name), 4)
    queues = [[x for x in orders if isinstance(x, Send | Receive | Reduce | Update)] for orders in script.instructions]
    while any(queues):
        heads = {rank: queue[0] for rank, queue in enumerate(queues) if queue}
        meeting = set()
        for rank, x in heads.items():
            match x:
                case Send():
                    other = heads.get(x.peer)
                    if isinstance(other, Receive) and other.peer == rank:
                        assert (other.edge, other.microbatch) == (x.edge, x.microbatch)
                        meeting = {rank, x.peer}
                case Reduce() | Update():
                    replicas = script.ranks_of(x.stage)
                    if all(heads.get(r) == x for r in replicas):
                        meeting = set(replicas)
            if meeting:
                break
        assert meeting, f"all wait: {heads}"
        for rank in meeting:
            queues[rank].pop(0)


class AtFile(Launcher):
    def __init__(self, *place):
        self.place = place

    def meet(self):
        return dist.FileStore(*self.place)


def be_rank(job, rank, world, store, exchange, pipe):
    """Be a rank for which gloo plays NCCL, the CPU the GPU that several share, or each process a machine."""
    try:
        preparation.exchange_of = lambda gpus: exchange
        if exchange == "gloo":
            preparation.this_machine = lambda: f"machine {rank}"
        preparation.open_links = partial(open_links, backend="gloo")
        preparation.replica_groups = lambda script, _, timeout: replica_groups(script, "gloo", timeout)
        pipe.send(run_rank(job, rank, AtFile(store, world)))
    except BaseException:
        pipe.send(traceback.format_exc())


def run_over(exchange, plan, folder, **options):
    """Run ``plan`` and return rank 0's report."""
    spec = ModelSpec("small-cnn")
    asked = uncorrected(STEPS, LR, timeout_s=SECONDS, save=folder / "trained.pt", device="cpu", **options)
    job = Job(plan, spec, asked)
    context = context_of()
    world = len(lower_run(plan, 1).devices)
    processes, pipes = [], []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (job, rank, world, str(folder / "store"), exchange, theirs)
            processes.append(context.Process(target=be_rank, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        found = []
        for pipe in pipes:
            assert pipe.poll(SECONDS), "a rank hangs"
            found.append(pipe.recv())
            assert not isinstance(found[-1], str), found[-1]
        return found[0]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("name", "exchange"),
    [*product(["two edges each way", "replicas"], ["nccl", "staged"]), ("two edges each way", "gloo")],
)
def test_messages_in_order_train_as_one_process_does(name, exchange, tmp_path):
    plan = plan_named(name)
    report = run_over(exchange, plan, tmp_path)
    losses, state = serial("small-cnn", BATCH, steps=STEPS, accumulate=4, optimizer="sgd", lr=LR)
    assert report.losses == pytest.approx(losses, abs=1e-5)
    trained = torch.load(tmp_path / "trained.pt")
    statistics = {
        key for key in state if plan.allocation.stages[0].replicas > 1 and (".running_" in key or "num_" in key)
    }
    one, other = ({k: x for k, x in each.items() if k not in statistics} for each in (trained, state))
    assert largest_difference(one, other) < 1e-5
    assert report.exchange == exchange
    assert all(transfer.measured_ns > 0 for transfer in report.transfers)


def test_an_evaluation_sends_forward_alone(tmp_path):
    report = run_over("nccl", plan_named("one edge each way"), tmp_path, evaluates=True)
    layers, loss, data = built("small-cnn", BATCH, 0)
    layers.eval()
    pairs = [data(m, 0) for m in range(4 * STEPS)]
    with torch.no_grad():
        assert report.losses == pytest.approx([float(loss(layers(x), target)) for x, target in pairs], abs=1e-6)
