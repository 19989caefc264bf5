"""What do plans have where nobody says batch and weights, beside the best of any interval under 2bw? A table.

``python -m scripts.studies.defaults`` prints that of docs/reference/updates.md:
for the examples of README and docs the
batch, the weights and the period by default, and those of ``--weights 2bw --batch any``, which was the default before.
"""

from __future__ import annotations

import pipeplan as pp

EXAMPLES: tuple[tuple[str, str, str, dict[str, object]], ...] = (
    ("example:resnet50", "4", "8GB", {"no_replicas": True}),
    ("example:resnet50", "4", "16GB", {}),
    ("example:resnet50", "8", "16GB", {"checkpointing": "stages", "bandwidth": "1Gbps"}),
    ("example:gpt2-small-b4-a100", "2x2", "16GB", {}),
)


def row(profile: str, gpus: str, mem: str, more: dict[str, object]) -> str:
    """Return a line of the table."""
    found = pp.plan(profile, gpus=gpus, mem=mem, **more)  # type: ignore[arg-type]
    before = pp.plan(profile, gpus=gpus, mem=mem, weights="2bw", batch="any", **more)  # type: ignore[arg-type]
    cells = [
        f"{profile.removeprefix('example:')}, {gpus} x {mem}" + "".join(f", `{name}`" for name in more),
        *(
            x
            for plan in (before, found)
            for x in (_samples(plan), plan.plan.policy.weights, f"{plan.period * 1e3:.3f}")
        ),
        f"{found.period_ns / before.period_ns - 1:+.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def _samples(found: pp.PlanResult) -> str:
    return str(found.plan.interval * found.plan.chain.microbatch)


if __name__ == "__main__":
    print("| example | batch before | weights | ms | batch now | weights | ms | price |")
    print("|---|--:|---|--:|--:|---|--:|--:|")
    for example in EXAMPLES:
        print(row(*example), flush=True)
