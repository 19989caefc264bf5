"""Small plans by hand, whose lowered runs can be told in advance."""

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Allocation, Plan, Provenance, Schedule
from pipeplan.problem import Chain, Layer, Platform
from pipeplan.schedule.pattern import make_pattern


def chain_of(times, output=0):
    layers = tuple(Layer(f"layer{i}", f, b, 4, output) for i, (f, b) in enumerate(times))
    return Chain("by hand", layers, 4)


ENDLESS = Schedule()


def plan_of(chain, stages, policy, schedule=ENDLESS):
    platform = Platform.flat(1 + max(d for stage in stages for d in stage.devices), 10**12)
    graph = stage_graph(chain, platform, policy, stages)
    pattern = make_pattern(
        graph, [sum(op.duration_ns for op in graph.operations[:i]) for i in range(len(graph.operations))], graph.path_ns
    )
    return Plan(chain, platform, policy, Allocation(tuple(stages)), pattern, (), Provenance("by hand"), schedule)
