"""How short can a period be by the work of all devices, the largest layer, and memory averaged over time? Quickly."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil

from ...cost import memory_model, time_model
from ...cost.saved import first_saved
from ...integers import ceil_div, most_in_common, smallest
from ...problem import Problem


def work_ns(problem: Problem) -> Fraction:
    """Return U: the least time that one microbatch takes in all on devices of speed 1, without recomputation."""
    chain, sums = problem.chain, problem.chain.sums
    # each replica steps once per interval; over all replicas a microbatch pays at least 1 / accumulate of a step, and
    # where they share it, no more, however many there are: more than accumulate of them make updates rarer
    fewest = problem.most_replicas if problem.policy.zero else 1
    step = Fraction(time_model.whole_step_ns(chain, 0, len(chain)), problem.policy.update_interval(fewest))
    if problem.policy.coarsening is not None:  # overlaps with all-reduces
        step = Fraction(0)
    return int(sums.forward_ns[-1]) + int(sums.backward_ns[-1]) + step


def load_bound(problem: Problem) -> int:
    """Return U / sum of speeds: even perfectly shared work takes that long."""
    return ceil(work_ns(problem) / sum(device.speed for device in problem.platform.devices))


def fill_bound(problem: Problem) -> int:
    """Return the least period of drained plans without replicas by work, as far as devices have begun; 0 for others.

    The device that is the i-th to have a stage begins when a forward has come through i layers and over as many cuts at
    least: the fastest may be the first. Weight parts may come last, so that none is sure to end early.
    """
    platform, policy = problem.platform, problem.policy
    count = policy.accumulate
    if not policy.drains or problem.replicas or count is None:
        return 0
    speeds = sorted((device.speed for device in platform.devices), reverse=True)
    levels = range(0 if platform.blocking else len(platform.levels))
    moves = [min((platform.transfer_ns(x, k) for k in levels), default=0) for x in problem.chain.cut_bytes[1:-1]]
    trip, forward = min(moves, default=0), problem.chain.sums.forward_ns
    work, done, total, power = count * work_ns(problem), Fraction(0), Fraction(0), Fraction(0)
    for i, speed in enumerate(speeds[: len(problem.chain)]):
        head = int(forward[i]) / speeds[0] + i * trip
        if power and done + power * (head - total) >= work:
            break
        done, total, power = done + power * (head - total), head, power + speed
    return ceil_div(ceil(total + (work - done) / power), count)


def layer_bound(problem: Problem) -> int:
    """Return the time of the largest layer on the fastest device, shared by all devices where replicas are allowed."""
    fastest = max(device.speed for device in problem.platform.devices)
    share = len(problem.platform) if problem.replicas else 1
    largest = max(layer.forward_ns + layer.backward_ns for layer in problem.chain.layers)
    return ceil(largest / fastest / share)


def memory_bound(problem: Problem) -> int:
    """Return the least period at which work, memory averaged over time, and communication could all be met.

    A tensor that layer i saves first is held at least from the start of F_i to the end of B_i, U(i..L) on the fastest
    device, by one microbatch in every period: ``sum saved_i * U(i..L) <= T * (memory - static)``. Recomputing layer i,
    wholly or in part, takes its forward once more and leaves its tensors held for B_i alone; what to recompute is a
    fractional knapsack over the idle time ``T * sum of speeds - U`` (ALGORITHMS section 5, "a bound for the full
    class"). A plan is one stage on r devices, whose weights are held and synchronised r times, or it has a cut, whose
    buffers stand on both its ends; the bound is the least over these cases. Weak where peaks exceed averages.
    """
    fastest = max(device.speed for device in problem.platform.devices)
    slowest = min(device.speed for device in problem.platform.devices)
    work = work_ns(problem)
    low = load_bound(problem)
    menus = _menus(problem)
    held = menus[0].held / fastest
    least: int | None = None
    for case in reversed(cases(problem)):  # many devices first: they allow the shortest periods
        bound = max(low, case.floor_ns)
        if (case.room_bytes <= 0 and held) or (least is not None and max(bound, ceil(work / case.speed)) >= least):
            continue
        for menu in menus:

            def enough(period: int, menu: _Menu = menu, case: Case = case) -> bool | None:
                idle = period * case.speed - work
                return (idle >= 0 and (menu.held - menu.saving(idle)) / fastest <= period * case.room_bytes) or None

            high = max(bound, ceil(work / slowest), ceil(held / max(1, case.room_bytes)))
            found = smallest(enough, bound, high)
            bound = high if found is None else found[0]
        least = bound if least is None else min(least, bound)
    return least or 0


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of plan: bytes left for activations over all its devices, their speeds' sum, the least period besides."""

    room_bytes: int
    speed: Fraction
    floor_ns: int


class _Menu:
    """What may be dropped, the best ratio of saving to price first, with running totals for quick look-ups.

    Items are (bytes, lifetime, time held when recomputed, price of recomputing or None for never), times in ns;
    ``held`` sums bytes times lifetime.
    """

    def __init__(self, items: Sequence[tuple[int, int, int, int | None]]) -> None:
        self.held = sum(size * lifetime for size, lifetime, _, _ in items)
        offers = [
            (size * (lifetime - rest), price)
            for size, lifetime, rest, price in items
            if size and lifetime > rest and price is not None
        ]
        offers.sort(key=_ratio, reverse=True)
        self._savings = [0, *accumulate(saving for saving, _ in offers)]
        self._prices = [0, *accumulate(price for _, price in offers)]

    def saving(self, idle: Fraction) -> Fraction:
        """Return the most bytes times ns that recomputation within ``idle`` ns takes off ``held``."""
        whole = bisect_right(self._prices, idle) - 1
        if whole + 1 == len(self._prices):
            return Fraction(self._savings[-1])
        share = (idle - self._prices[whole]) / (self._prices[whole + 1] - self._prices[whole])
        return self._savings[whole] + share * (self._savings[whole + 1] - self._savings[whole])


def _ratio(offer: tuple[int, int]) -> int:
    """Return saving / price, in units so small that no two ratios of prices up to a day are taken for one."""
    saving, price = offer
    return (saving << 128) // price if price else 1 << 512


def cases(problem: Problem) -> list[Case]:
    """Return the kinds of plans that there are: one stage on so many devices, or a cut."""
    platform, policy = problem.platform, problem.policy
    devices = sorted(platform.devices, key=lambda device: device.memory_bytes, reverse=True)
    speeds = sorted((device.speed for device in platform.devices), reverse=True)
    weight_bytes, parameters = memory_model.weights_of(problem.chain, 0, len(problem.chain))
    own = memory_model.own_of(problem.chain, 0, len(problem.chain))
    gradient = memory_model.summed_bytes(policy, (weight_bytes, parameters), own)
    fastest = max(level.bandwidth for level in platform.levels), platform.paths[0][1]
    memories, powers = list(accumulate(d.memory_bytes for d in devices)), list(accumulate(speeds))
    cases = []
    for r in range(1, len(platform) + 1 if problem.replicas else 2):
        sync = time_model.sync_period_ns(policy, gradient, r, *fastest)
        weights = memory_model.weights_bytes(policy, weight_bytes, parameters, 1, r, own)
        cases.append(Case(memories[r - 1] - r * weights, powers[r - 1], sync))
    if len(platform) > 1 and len(problem.chain) > 1:
        least_cut = min(problem.chain.cut_bytes[1:-1])
        levels = range(len(platform.levels))
        load = min(platform.transfer_ns(least_cut, k) * (1 if platform.both_ways(k) else 2) for k in levels)
        floor = ceil_div(load, most_in_common(len(platform)) if problem.replicas else 1)
        weights = memory_model.weights_bytes(policy, weight_bytes, parameters, 1, own=own)
        cases.append(Case(memories[-1] - weights - 4 * least_cut, powers[-1], floor))
    return cases


def _menus(problem: Problem) -> list[_Menu]:
    """Return what may be dropped and at what price; each menu gives a valid bound.

    In a chain whose layers save their inputs, dropping the input of layer i also needs the forward of layer i - 1, and
    the network's own input is never dropped; that is the second menu.
    """
    chain = problem.chain
    total = chain.sums.forward_ns + chain.sums.backward_ns
    if problem.policy.drains:  # some schedules leave the gradients of weights for later
        total = total - chain.sums.backward_weight_ns
    behind = (total[-1] - total[:-1]).tolist()
    sizes = first_saved(chain)
    forwards = [layer.forward_ns for layer in chain.layers]
    prices: list[list[int | None]] = [[None] * len(chain)]
    if problem.checkpointing != "none":
        prices = [[*forwards]]
        if chain.edges is None and all(layer.saved_bytes is None for layer in chain.layers):
            prices.append([None, *forwards[:-1]])
    return [
        _Menu(
            [
                (size, behind[i], int(total[i + 1] - total[i]) - layer.forward_ns, price)
                for i, (size, layer, price) in enumerate(zip(sizes, chain.layers, row, strict=True))
            ]
        )
        for row in prices
    ]
