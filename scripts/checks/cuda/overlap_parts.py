"""What goes on beside what on a GPU: offloading, loaders, and whether events tell what kernels take?"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from checking import FLUSH, STRAIGHT, Check, Figures, Outcome, Part, built, figures_of, needed
from device_parts import said

import pipeplan as pp
from pipeplan.runtime.device import clock_of

ADAM = {**FLUSH, "optimizer": "adam"}


def offload(check: Check) -> Outcome:
    """Compare an offloaded optimizer's update with one on the GPU."""
    found: Figures = {}
    for name, more in (("on the GPU", {}), ("offloaded", {"offload": True})):
        report = check.run(check.plan("gpt", 1, {**ADAM, **more}), "gpt", 12)
        found[name] = report["measured_period_ns"] or report["seconds"] * 1e9
    ratio = found["offloaded"] / found["on the GPU"]
    return Outcome(f"a microbatch with an offloaded optimizer takes {ratio:.2f} of one without", found)


def loading(check: Check) -> Outcome:
    """Compare a loader with workers with data that are there."""
    plan = check.plan("gpt", 2, STRAIGHT)
    found = {data: figures_of(check.run(plan, data, 12)) for data in ("gpt", "loader")}
    periods = {name: row["measured_period_ns"] or 0 for name, row in found.items()}
    ratio = periods["loader"] / max(1, periods["gpt"])
    return Outcome(f"a microbatch with a loader takes {ratio:.2f} of one without", {"periods": periods})


def events(check: Check) -> Outcome:
    """Compare what events around passes say with what torch's profiler says of the kernels between them."""
    needed(check.kind == "cuda", "a CPU has no kernels")
    from torch.profiler import ProfilerActivity, profile

    layers, loss, data = built(check, "gpt")
    x, target = data(0)
    clock, times = clock_of(check.device), []
    for _ in range(3):
        loss(layers(x), target).backward()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(20):
            start = clock.mark()
            loss(layers(x), target).backward()
            end = clock.mark()
            clock.settle()
            times.append(clock.between(start, end))
    kernels = sum(event.device_time_total for event in watched.key_averages()) * 1e3 / len(times)
    share = kernels / statistics.median(times)
    clocks = said("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw", "--format=csv")
    return Outcome(
        f"kernels take {share:.2f} of what events say of a pass", {"share": share, "event_ns": times, "clocks": clocks}
    )


def streams(check: Check) -> Outcome:
    """Run two streams' kernels at once, and copies beside kernels: what of it goes on together?"""
    needed(check.kind == "cuda", "a CPU has no streams")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types there
    square = torch.randn(4096, 4096, device="cuda")
    host, there = (
        torch.empty(2**28, dtype=torch.uint8).pin_memory(),
        torch.empty(2**28, dtype=torch.uint8, device="cuda"),
    )

    def products() -> None:
        for _ in range(20):
            square @ square

    def copies() -> None:
        there.copy_(host, non_blocking=True)

    def both(beside: Any) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside()
        products()
        torch.cuda.current_stream().wait_stream(side)

    from constant_parts import median_ns

    alone = {"products": median_ns(check, products), "copies": median_ns(check, copies)}
    together = {"products": median_ns(check, lambda: both(products)), "copies": median_ns(check, lambda: both(copies))}
    hidden = (alone["products"] + alone["copies"] - together["copies"]) / min(alone.values())
    return Outcome(f"{hidden:.0%} of a copy goes on beside products", {"alone": alone, "together": together})


def clocks(check: Check) -> Outcome:
    """Measure a model twice, cold and warm, to see what the first steps are worth."""
    from checked_models import MODELS
    from constant_parts import warmed

    found = []
    for seconds in (0.0, 2.0):
        warmed(check, seconds)
        chain = pp.profile(f"zoo:{MODELS['gpt'][0]}", microbatch=1, device=check.kind, steps=4).chain
        found.append(sum(layer.forward_ns + layer.backward_ns for layer in chain.layers))
    return Outcome(f"measured cold a model takes {found[0] / found[1]:.2f} of what it takes warm", {"ns": found})


OVERLAP = {
    "overlap_streams": Part(streams, "Do copies go on beside products?", 10),
    "overlap_events": Part(events, "Do events tell what kernels take?", 20),
    "overlap_clocks": Part(clocks, "What are first steps worth?", 20),
    "overlap_offload": Part(offload, "Does offloading go on beside passes?", 30),
    "overlap_loader": Part(loading, "Do loaders?", 25),
}
