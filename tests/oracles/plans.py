"""What are a plan's period and memory? From its JSON alone, by formulas and an event loop that share no code.

For chains without views and shared weights, of stages on equal or disjoint GPUs in fp32 or mixed precision,
with replicas, ZeRO-1, offloaded state, recomputed segments and levels of bandwidth: periodic patterns, and mini-batches
that drain under orders that are written out, GPipe's, 1F1B's, and message-driven's. :class:`Unjudged` says what else a
plan has.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil, lcm
from types import SimpleNamespace
from typing import Any

from oracles.schedules import weights_table

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "Gbps": 125 * 10**6}
TIMES = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
PLAIN = {"weights", "accumulate", "optimizer", "precision", "zero", "bucket_parameters", "coarsening", "offload"}
PLAIN |= {"vertical_sync"}
LAYER = {"name", "forward_ns", "backward_ns", "weight_bytes", "output_bytes", "saved_bytes", "optimizer_ns"}
LAYER |= {"parameters", "backward_weight_ns"}


class Unjudged(Exception):
    """The plan has something that nothing here speaks of."""


class Judged:
    """The figures of one plan: ``period`` in ns, and for each GPU (weights, activations, buffers, in flight)."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.policy, self.layers = plan["policy"], plan["profile"]["layers"]
        self.stages, self.kind = plan["stages"], plan["schedule"]["kind"]
        self.plan = plan
        _refuse(plan)
        self.levels = [
            (x["count"], quantity(x["bandwidth"], UNITS), quantity(x.get("latency") or 0, TIMES))
            for x in plan["platform"]["levels"]
        ]
        count = 1
        for size, _, _ in self.levels:
            count *= size
        listed = plan["platform"].get("devices") or [{}] * count
        memory = plan["platform"].get("memory")
        self.memory = [quantity(x.get("memory", memory), UNITS) for x in listed]
        self.speed = [Fraction(x.get("speed") or 1).limit_denominator(10**6) for x in listed]
        self.counted = self.policy["accumulate"] or 1
        self.forward, self.backward = [], []
        self.homes = [tuple(x["devices"]) for x in self.stages]
        self.cuts = [self.tensor(x["start"]) for x in self.stages[1:]]
        self.sends = [size > 0 and a != b for size, a, b in zip(self.cuts, self.homes, self.homes[1:], strict=False)]
        for stage, home in zip(self.stages, self.homes, strict=True):
            speed = min(self.speed[d] for d in home)
            again = sum(self.layers[i]["forward_ns"] for a, b in stage["checkpoint"] or () for i in range(a, b))
            self.forward.append(ceil(self.total(stage, "forward_ns") / speed))
            work = self.total(stage, "backward_ns") + again + self.step(stage)
            self.backward.append(ceil(work / speed))
        self.split = False
        self.in_flight: dict[tuple[int, int], int] = {}
        self.held: dict[int, int] = defaultdict(int)
        self.period = self.of_pattern() if self.kind == "pattern" else self.of_batch(plan["schedule"])

    # What stages cost.

    def total(self, stage: dict[str, Any], name: str) -> int:
        return sum(x.get(name) or 0 for x in self.layers[stage["start"] : stage["stop"]])

    def tensor(self, number: int) -> int:
        return int(self.layers[number - 1]["output_bytes"] if number else self.plan["profile"]["input_bytes"])

    def interval(self, replicas: int) -> int:
        return max(replicas, self.counted)

    def step(self, stage: dict[str, Any]) -> int:
        """Return what a microbatch pays of the optimizer's step."""
        replicas = len(stage["devices"])
        if self.policy["weights"] == "flush":
            return 0  # it comes behind the batch
        sharers = replicas if self.policy["zero"] else 1
        return ceil(Fraction(self.total(stage, "optimizer_ns") * replicas, self.interval(replicas) * sharers))

    def saved(self, i: int) -> int:
        found = self.layers[i].get("saved_bytes")
        return int(self.tensor(i) if found is None else found)

    def activations(self, stage: dict[str, Any]) -> tuple[int, int]:
        """Return what a microbatch leaves between its passes, and the most that it holds in its backward."""
        kept = most = 0
        at = stage["start"]
        for first, last in [*(stage["checkpoint"] or ()), (stage["stop"], stage["stop"])]:
            kept += sum(map(self.saved, range(at, first)))
            most = max(most, kept)
            if first < last:
                own = sum(map(self.saved, range(first, last)))
                kept += self.tensor(first)
                known = self.layers[first].get("saves") == []  # that the input isn't among what is saved
                most = max(most, kept + own - (0 if known else min(self.saved(first), self.tensor(first))))
            at = last
        return kept, most

    def total_saved(self, stage: dict[str, Any]) -> int:
        return sum(map(self.saved, range(stage["start"], stage["stop"])))

    def weights(self, s: int, held: int) -> int:
        stage, first = self.stages[s], max(self.in_flight.get((d, 0), 0) for d in self.homes[0])
        parameters = sum(self.parameters(x) for x in self.layers[stage["start"] : stage["stop"]])
        replicas, entered = len(stage["devices"]), (max(1, first), len(self.homes[0]))
        policy = SimpleNamespace(**self.policy)
        return weights_table(policy, self.total(stage, "weight_bytes"), parameters, max(1, held), replicas, entered)

    @staticmethod
    def parameters(layer: dict[str, Any]) -> int:
        return int(layer["weight_bytes"] // 4 if layer.get("parameters") is None else layer["parameters"])

    def buffers(self, s: int) -> int:
        before = self.cuts[s - 1] if s and self.sends[s - 1] else 0
        return 2 * before + 2 * (self.cuts[s] if s < len(self.cuts) and self.sends[s] else 0)

    # What the network costs.

    def path(self, *devices: int) -> tuple[int, int]:
        """Return (bytes/s, latency) of the lowest level that joins all devices: the slowest up to it."""
        size, slowest, latency = 1, 10**30, 0
        for count, bandwidth, waits in self.levels:
            size, slowest, latency = size * count, min(slowest, bandwidth), max(latency, waits)
            if len({d // size for d in devices}) == 1:
                return slowest, latency
        raise Unjudged("devices that nothing joins")

    def transfer(self, s: int) -> int:
        """Return the ns of a message between stages ``s`` and ``s + 1``."""
        one, other = self.homes[s], self.homes[s + 1]
        if max(one) < min(other) or max(other) < min(one) or len(self.levels) == 1:
            bandwidth, latency = self.path(*one, *other)
        else:
            pairs = [(one[m % len(one)], other[m % len(other)]) for m in range(lcm(len(one), len(other)))]
            paths = [self.path(*x) for x in pairs]
            bandwidth, latency = min(x for x, _ in paths), max(x for _, x in paths)
        return latency + ceil(Fraction(self.cuts[s] * 10**9, bandwidth))

    def sync(self, stage: dict[str, Any]) -> int:
        """Return what each microbatch leaves for the sum over a stage's replicas."""
        r, home = len(stage["devices"]), stage["devices"]
        parameters = sum(self.parameters(x) for x in self.layers[stage["start"] : stage["stop"]])
        size = 2 * parameters if self.policy["precision"] == "mixed" else self.total(stage, "weight_bytes")
        if r == 1 or not size:
            return 0
        bandwidth, latency = self.path(*home)
        ring = Fraction(2 * (r - 1) * size * 10**9, r * bandwidth) + 2 * (r - 1) * latency
        return ceil(ring / self.interval(r))

    def lane(self, kind: str, s: int, m: int) -> tuple[Any, ...]:
        """Return where an operation on microbatch ``m`` runs: a GPU, or a link."""
        if not kind.startswith("SEND"):
            return ("gpu", self.homes[s][m % len(self.homes[s])])
        ends = self.homes[s], self.homes[s + 1 if kind == "SEND_F" else s - 1]
        pair = tuple(x[m % len(x)] for x in ends)
        both = self.plan["platform"].get("full_duplex")
        return ("link", *(ends if both else sorted(ends)), *(pair if both else sorted(pair)))

    def operations(self) -> list[tuple[str, int, int]]:
        """Return (kind, stage, ns) of all that a microbatch goes through."""
        last = len(self.stages) - 1
        out: list[tuple[str, int, int]] = []
        for s in range(last + 1):
            out.append(("F", s, self.forward[s]))
            out += [("SEND_F", s, self.transfer(s))] if s < last and self.sends[s] else []
        for s in reversed(range(last + 1)):
            out.append(("B", s, self.backward[s]))
            out += [("SEND_B", s, self.transfer(s - 1))] if s and self.sends[s - 1] else []
        return out

    def weight_parts(self) -> list[tuple[str, int, int]]:
        """Return (W, stage, ns) of each stage: the share of the step, too."""
        found = []
        for s, stage in enumerate(self.stages):
            layers = self.layers[stage["start"] : stage["stop"]]
            parts = [x.get("backward_weight_ns") for x in layers]
            halves = [x["backward_ns"] // 2 if x["weight_bytes"] else 0 for x in layers]
            work = sum(half if part is None else part for part, half in zip(parts, halves, strict=True))
            found.append(("W", s, ceil((work + self.step(stage)) / min(self.speed[d] for d in stage["devices"]))))
        return found

    # Patterns.

    def of_pattern(self) -> int:
        """Return the period of a pattern whose starts are right, after which memory is known."""
        pattern = self.plan["pattern"]
        period, listed = pattern["period_ns"], pattern["operations"]
        assert [(x["kind"], x["stage"], x["duration_ns"]) for x in listed] == self.operations(), "operations"
        starts = [x["start_ns"] for x in listed]
        for one, other in pairwise(listed):
            assert other["start_ns"] >= one["start_ns"] + one["duration_ns"], "path"
        loads: dict[tuple[int, ...], int] = defaultdict(int)
        for stage, home in zip(self.stages, self.homes, strict=True):
            loads[home] += self.sync(stage)
        assert max(loads.values()) <= period, "sums of gradients take longer"
        window = lcm(*(len(x) for x in self.homes))
        reach = (max(starts) + max(x["duration_ns"] for x in listed)) // period + 2
        spans: dict[tuple[Any, ...], list[tuple[int, int, str, int]]] = defaultdict(list)
        for m in range(-reach - window, window + reach):
            for x in listed:
                begin = x["start_ns"] + m * period
                lane = self.lane(x["kind"], x["stage"], m)
                spans[lane].append((begin, begin + x["duration_ns"], x["kind"], x["stage"]))
        for lane, found in spans.items():
            found.sort()
            for one, other in pairwise(found):
                assert one[1] <= other[0], f"{lane} is busy twice"
        self.weigh(spans)
        if self.policy["weights"] == "2bw" and self.policy["accumulate"] is not None:
            for s in range(len(self.stages)):
                here = {x["kind"]: x for x in listed if x["stage"] == s}
                lasts = here["B"]["start_ns"] + here["B"]["duration_ns"] - here["F"]["start_ns"]
                assert ceil(Fraction(lasts, period)) <= self.policy["accumulate"], "a third version"
        return int(period)

    def weigh(self, spans: dict[tuple[Any, ...], list[tuple[int, int, str, int]]]) -> None:
        """Note the most that each GPU holds at once, of everything and of each stage, as its passes go by."""
        for lane, passes in spans.items():
            if lane[0] != "gpu":
                continue
            changes: list[tuple[int, int, int, int]] = []
            for begin, end, kind, s in passes:
                kept, most = self.activations(self.stages[s])
                if self.split:
                    most = max(most, self.total_saved(self.stages[s]))
                more, less = (begin, 0, s, most - kept), (end, -1, s, -most)
                changes += {"F": [(begin, 1, s, kept)], "B": [more] if self.split else [more, less], "W": [less]}[kind]
            held = dict.fromkeys(range(len(self.stages)), 0)
            counts = dict(held)
            for _, count, s, change in sorted(changes, key=lambda x: (x[0], x[3] > 0)):
                held[s] += change
                counts[s] += count
                self.held[lane[1]] = max(self.held[lane[1]], sum(held.values()))
                self.in_flight[lane[1], s] = max(self.in_flight.get((lane[1], s), 0), counts[s])

    # Mini-batches that drain.

    def of_batch(self, schedule: dict[str, Any]) -> int:
        """Return the time per microbatch of a mini-batch that is run as soon as all can."""
        count, last = schedule["microbatches"], len(self.stages) - 1
        orders = dict(self.orders(schedule))
        whole = self.operations()
        path, tail = whole + self.weight_parts() * self.split, len(whole)
        for i, (kind, s, lasts) in enumerate(whole):
            if self.split and kind == "B":
                path[i] = (kind, s, lasts - path[tail + s][2])
        ready: dict[tuple[int, int], int] = {}  # when what a step needs is there
        waiting: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
        free: dict[tuple[Any, ...], int] = defaultdict(int)
        spans: dict[tuple[Any, ...], list[tuple[int, int, str, int]]] = defaultdict(list)
        done = [0] * (last + 1)
        events: list[tuple[int, tuple[Any, ...]]] = []
        pipelines = len(self.homes[0])
        limit = pipelines * schedule["limit"] if self.kind == "message-driven" and schedule.get("limit") else count
        if self.kind == "message-driven" and not schedule.get("limit"):
            limit = pipelines * (2 * last + 1 if any(self.sends) else last + 1)

        def come(m: int, i: int, at: int) -> None:
            lane = self.lane(*path[i][:2], m)
            ready[m, i] = at
            waiting[lane].append((m, i))
            heappush(events, (max(at, free[lane]), lane))

        def chosen(lane: tuple[Any, ...], now: int) -> tuple[int, int] | None:
            if lane in orders:
                kind, s, m = orders[lane][0] if orders[lane] else ("", 0, 0)
                return next(((n, i) for n, i in waiting[lane] if n == m and path[i][:2] == (kind, s)), None)
            here = [x for x in waiting[lane] if ready[x] <= now]

            def rank(x: tuple[int, int]) -> tuple[Any, ...]:
                kind, s, _ = path[x[1]]
                urgent = lane[0] == "gpu" and s == (last if kind == "B" else 0)
                return not urgent, ready[x], lane[0] == "gpu" and kind != "B", *x

            return min(here, key=rank, default=None)

        for m in range(min(count, limit)):
            come(m, 0, 0)
        while events:
            now, lane = heappop(events)
            if now < free[lane]:
                heappush(events, (free[lane], lane))
                continue
            same = [lane]
            while events and events[0][0] == now:
                same.append(heappop(events)[1])
            for lane in dict.fromkeys(same):
                if now < free[lane]:
                    continue
                step = chosen(lane, now)
                if step is None or ready[step] > now:
                    continue
                m, i = step
                kind, s, lasts = path[i]
                waiting[lane].remove(step)
                if lane in orders:
                    orders[lane].pop(0)
                free[lane] = now + lasts
                spans[lane].append((now, free[lane], kind, s))
                heappush(events, (free[lane], lane))
                if i + 1 < tail:
                    come(m, i + 1, free[lane])
                elif i + 1 == tail and m + limit < count:
                    come(m + limit, 0, free[lane])
                if self.split and kind == "B":
                    come(m, tail + s, free[lane])
                if kind == ("W" if self.split else "B"):
                    done[s] = max(done[s], free[lane])
        assert sum(map(len, spans.values())) == count * len(path), "the order waits for itself"
        if self.kind == "flush":
            self.of_pattern()  # as much as if it did not drain
        else:
            self.weigh(spans)
        ends: dict[tuple[int, ...], int] = defaultdict(int)
        for at, s in sorted(zip(done, range(last + 1), strict=True)):
            ends[self.homes[s]] = max(ends[self.homes[s]], at) + self.update(self.stages[s])
        for stage, home in zip(self.stages, self.homes, strict=True):
            ends[home] += self.whole_step(stage) if self.policy["coarsening"] is None else 0
        return ceil(Fraction(max(ends.values()), count))

    def whole_step(self, stage: dict[str, Any]) -> int:
        """Return the time of a stage's step behind a batch."""
        sharers = len(stage["devices"]) if self.policy["zero"] else 1
        speed: Fraction = min(self.speed[d] for d in stage["devices"])
        return ceil(ceil(Fraction(self.total(stage, "optimizer_ns"), sharers)) / speed)

    def update(self, stage: dict[str, Any]) -> int:
        """Return the time of a stage's sum behind a batch, and of its step where the two overlap in chunks."""
        replicas = len(stage["devices"])
        summed = self.sync(stage) * self.interval(replicas)
        if self.policy["coarsening"] is None:
            return summed
        step = self.whole_step(stage)
        parameters = sum(self.parameters(x) for x in self.layers[stage["start"] : stage["stop"]])
        chunk = self.policy["coarsening"] * self.policy["bucket_parameters"]
        return max(summed, step) + ceil(Fraction(min(summed, step), max(1, ceil(Fraction(parameters, chunk)))))

    def orders(self, schedule: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], list[tuple[str, int, int]]]]:
        """Yield what GPUs run in a fixed order: (kind, stage, microbatch)."""
        count, stages = schedule["microbatches"], len(self.stages)
        if self.kind == "written":
            for text in schedule["order"]:
                steps = [(x[2], int(x[1]), int(x[3])) for x in re.finditer(r"(\d+)([A-Z_]+)(\d+)", text)]
                said = {kind for kind, _, _ in steps}
                self.split |= "I" in said
                if said != {"F", "B"} and (said != {"F", "I", "W"} or len(steps) % 3):
                    raise Unjudged(f"an order of {', '.join(sorted(said))}")
                pipelines = len(self.homes[0])
                for place, device in enumerate(self.homes[steps[0][1]]):
                    yield (
                        ("gpu", device),
                        [("B" if x == "I" else x, s, m * pipelines + place) for x, s, m in steps],
                    )
        elif self.kind == "flush":
            pattern = self.plan["pattern"]
            lanes: dict[tuple[Any, ...], list[tuple[int, int, int, str, int]]] = defaultdict(list)
            for m in range(count):
                for i, x in enumerate(pattern["operations"]):
                    at = x["start_ns"] + m * pattern["period_ns"], x["duration_ns"], m, i
                    lanes[self.lane(x["kind"], x["stage"], m)].append((*at[:3], x["kind"], x["stage"]))
            for lane, found in lanes.items():
                yield lane, [(kind, s, m) for _, _, m, kind, s in sorted(found, key=lambda x: x[:3])]
        elif self.kind in ("gpipe", "1f1b"):
            for s, home in enumerate(self.homes):
                for place, device in enumerate(home):
                    mine = range(place, count, len(home))
                    first = min(stages - s, len(mine)) if self.kind == "1f1b" else len(mine)
                    steps = [("F", s, m) for m in mine[:first]]
                    for done, m in enumerate(mine):
                        steps.append(("B", s, m))
                        steps += [("F", s, x) for x in mine[first + done : first + done + 1]]
                    yield ("gpu", device), steps
        elif self.kind != "message-driven":
            raise Unjudged(self.kind)

    # What the file says.

    def contradictions(self) -> list[str]:
        """Return where the plan's figures are others."""
        found = []
        for d, told in enumerate(self.plan["devices"]):
            here = [s for s, home in enumerate(self.homes) if d in home]
            counts = [self.in_flight.get((d, s), 0) for s in here]
            weights = sum(self.weights(s, n) for s, n in zip(here, counts, strict=True))
            activations = self.held[d]
            buffers = sum(map(self.buffers, here))
            own = (self.memory[d], weights + activations + buffers, weights, activations, buffers, counts)
            names = ("memory_bytes", "peak_bytes", "weights_bytes", "activation_bytes", "buffer_bytes", "in_flight")
            found += [f"devices[{d}].{n}: {told[n]}, not {x}" for n, x in zip(names, own, strict=True) if told[n] != x]
            found += [f"devices[{d}] is too full"] if own[1] > own[0] else []
        bound = next(x["period_ns"] for x in self.plan["lower_bounds"] if x["class"] == "any")
        if self.kind != "pattern" and abs(self.plan["gap"] - (self.period / bound - 1)) > 1e-9:
            found.append(f"gap: {self.plan['gap']}, not {self.period} / {bound} - 1")
        if self.kind == "pattern" and self.plan["gap"] < self.period / bound - 1 - 1e-9:  # updates may wait longer
            found.append(f"gap: {self.plan['gap']} is less than {self.period} / {bound} - 1")
        counted = self.counted if self.policy["weights"] == "flush" else self.interval(max(map(len, self.homes)))
        samples = counted * self.plan["profile"]["microbatch"]
        if self.plan["samples_per_update"] != samples:
            found.append(f"samples_per_update: {self.plan['samples_per_update']}, not {samples}")
        return found


def _refuse(plan: dict[str, Any]) -> None:
    """Raise Unjudged for what nothing here speaks of."""
    policy, profile, platform = plan["policy"], plan["profile"], plan["platform"]
    odd = [name for name, value in policy.items() if name not in PLAIN and value]
    odd += ["zero"] if policy["zero"] > 1 else []
    odd += ["edges"] if profile.get("edges") is not None else []
    odd += [x for x in ("tied", "shared", "variants", "working_bytes") if profile.get(x)]
    odd += [x for x in platform if x not in ("levels", "devices", "memory", "full_duplex") and platform[x]]
    odd += [x for level in platform["levels"] for x in level if x not in ("count", "bandwidth", "latency")]
    odd += [x for device in platform.get("devices") or () for x in device if x not in ("memory", "speed")]
    odd += [x for layer in profile["layers"] for x in layer if x not in LAYER and (layer[x] or x == "view_of")]
    odd += [x for stage in plan["stages"] for x in stage if x not in ("start", "stop", "devices", "checkpoint")]
    homes = [tuple(x["devices"]) for x in plan["stages"]]
    if plan["schedule"]["kind"] in ("gpipe", "1f1b") and len(set(homes)) < len(homes):
        odd.append("lists of stages that share a GPU")
    if plan["schedule"]["kind"] != "pattern" and policy["weights"] != "flush":
        odd.append("mini-batches that do not drain")
    odd += [policy["weights"]] if policy["weights"] not in ("2bw", "stash", "latest", "flush") else []
    if odd:
        raise Unjudged(", ".join(dict.fromkeys(odd)))


def quantity(text: Any, units: dict[str, int]) -> int:
    """Return bytes, bytes/s or ns of a text or number."""
    if isinstance(text, int | float):
        return int(text)
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z]+?)(/s)?\s*", text)
    if found is None or found[2] not in units:
        raise Unjudged(f"{text!r}")
    return int(Fraction(found[1]) * units[found[2]])
