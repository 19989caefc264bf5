"""Which plan is in a file, and what is wrong with it? Written, it has the figures that follow from it.

Reading never trusts a file: keys and types are checked by its form, values by the model, and reported figures are
recomputed.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from inspect import cleandoc
from itertools import zip_longest
from typing import Annotated, Any, Literal

import msgspec

from ..check.bounds import bounded, derived_up_to, overstated
from ..check.evaluate import Evaluation, evaluate, gap
from ..check.lateness import plan_delays
from ..check.validate import judged
from ..errors import BadInput, InvalidPlan
from ..names import shown
from ..plan import Allocation, Alternative, Bound, Pattern, Plan, Provenance, Schedule, Stage, TimedOp
from ..problem import Platform, Policy
from ..schedule.pattern import DeviceUse, Group
from ..schedule.weight_versions import Delay
from .forms import Instant, Positive, converted, form, json_text, read_json
from .machines.accelerators import Accelerator
from .machines.platforms import PlatformFile, grouped, platform_form, platform_of
from .profiles import ProfileFile, chain_of, digest, profile_keys
from .text import read_text

EmbeddedProfile = msgspec.defstruct("EmbeddedProfile", [("digest", str)], bases=(ProfileFile,), kw_only=True)
EmbeddedProfile.__doc__ = "A profile inside a plan, with the SHA-256 of its own JSON."
PolicyFile = form(
    Policy,
    [field.name for field in fields(Policy) if field.name != "pipelines"],
    optional=(),
    accumulate=Positive,
    bucket_parameters=Positive,
    coarsening=Positive | None,
    bytes_per_parameter=Positive | None,
    shared_bytes_per_parameter=Positive | None,
)
StageFile = form(
    Stage,
    optional=("tensor", "selective", "offloaded"),
    brief=True,
    checkpoint=tuple[tuple[int, int], ...] | None,
    tensor=Positive,
)
ScheduleFile = form(
    Schedule,
    optional=("microbatches", "limit", "order"),
    brief=True,
    microbatches=Positive | None,
    limit=Positive | None,
)
TimedOpFile = form(TimedOp, start_ns=Instant, duration_ns=Instant)
PatternFile = form(Pattern, period_ns=Instant, operations=tuple[TimedOpFile, ...])  # type: ignore[valid-type]  # a form
GroupFile = form(Group, number=int)
DeviceUseFile = form(
    DeviceUse,
    ("memory_bytes", "peak_bytes", "weights_bytes", "activation_bytes", "buffer_bytes", "in_flight"),
    peak_bytes=int,
    in_flight=list[int],
)
BoundFile = form(
    Bound,
    ("allocation", "replicas", "checkpointing", "period_ns", "any_interval", "schedule"),
    optional=(),
    rename={"allocation": "class"},
    period_ns=Positive,
)
AlternativeFile = form(Alternative, brief=True, microbatches=Positive, period_ns=Positive | None)
ProvenanceFile = form(
    Provenance,
    optional=("alternatives",),
    brief=True,
    alternatives=tuple[AlternativeFile, ...],  # type: ignore[valid-type]  # a form
    claimed_period_ns=Annotated[int, msgspec.Meta(ge=1, le=10**18)] | None,
    seconds=Annotated[float, msgspec.Meta(ge=0)],
)
DelayFile = form(Delay)
PlanFile: type[Any] = msgspec.defstruct(
    "PlanFile",
    [
        ("format", Literal["pipeplan-plan/1"]),
        ("profile", EmbeddedProfile),
        ("platform", PlatformFile),
        ("policy", PolicyFile),
        ("stages", list[StageFile]),  # type: ignore[valid-type]  # a form
        ("schedule", ScheduleFile),
        ("samples_per_update", Positive),
        ("pattern", PatternFile | None),
        ("groups", list[GroupFile] | None),  # type: ignore[valid-type]  # a form
        ("delays", list[DelayFile]),  # type: ignore[valid-type]  # a form
        ("devices", list[DeviceUseFile]),  # type: ignore[valid-type]  # a form
        ("lower_bounds", list[BoundFile]),  # type: ignore[valid-type]  # a form
        ("gap", float),
        ("provenance", ProvenanceFile),
    ],
    namespace={
        "__doc__": "A plan; ``gap`` is the period over the lower bound of class ``any``, minus 1; ``groups`` are the "
        "pattern's, null where there is none; ``delays`` are the updates that gradients miss, by stages."
    },
    forbid_unknown_fields=True,
    kw_only=True,
)

SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "profile": ProfileFile,
    "platform": PlatformFile,
    "plan": PlanFile,
    "accelerator": Accelerator,
}


def schema(form: type) -> Any:
    """Return the JSON schema of a form, such as one of these, with docstrings as they read, whichever msgspec is there:
    only newer ones take their indentation away."""

    def described(node: dict[str, Any]) -> dict[str, Any]:
        return {key: cleandoc(x) if key == "description" and isinstance(x, str) else x for key, x in node.items()}

    return json.loads(msgspec.json.encode(msgspec.json.schema(form)), object_hook=described)


def plan_text(plan: Plan, result: Evaluation | None = None) -> str:
    """Return the JSON of a valid plan, with the figures that its stages and starts give: ``result``, or computed."""
    return json_text(plan_form(plan, result))


def plan_form(plan: Plan, result: Evaluation | None = None) -> Any:
    """Return the :data:`PlanFile` of a plan that has passed the validator; ``result`` is its evaluation if known."""
    result = result or evaluate(plan)
    bound = any_class_bound(plan)
    assert bound is not None
    keys = {
        "format": "pipeplan-plan/1",
        "profile": profile_keys(plan.chain) | {"digest": digest(plan.chain)},
        "platform": platform_form(plan.platform.whole or plan.platform),
        "policy": replace(plan.policy, accumulate=plan.policy.accumulate or 1),
        "stages": [
            StageFile(s.start, s.stop, gpus_of(plan.platform, s), s.checkpoint or None, *s.way)
            for s in plan.allocation.stages
        ],
        "schedule": plan.schedule,
        "samples_per_update": plan.interval * plan.chain.microbatch,
        "pattern": plan.pattern,
        "groups": result.groups or None,
        "delays": plan_delays(plan, result.graph),
        "devices": result.devices,
        "lower_bounds": plan.lower_bounds,
        "gap": gap(result.period_ns, bound),
        "provenance": plan.provenance,
    }
    return converted(keys, PlanFile)


def gpus_of(platform: Platform, stage: Stage) -> tuple[int, ...]:
    """Return the numbers of a stage's GPUs, group by group."""
    return tuple(gpu for device in stage.members for gpu in platform.gpus(device))


def any_class_bound(plan: Plan) -> Bound | None:
    """Return the bound of class ``any`` under any schedule, which every plan quotes."""
    return next((bound for bound in plan.lower_bounds if bound.allocation == "any" and not bound.schedule), None)


def read_plan(path: str) -> tuple[Plan, list[str]]:
    """Return the plan in a JSON file and every violation: rules broken, and reported figures that don't follow.

    BadInput when the file isn't a plan at all. Figures are compared only when the rules hold; without that they have
    no meaning. Bounds of class ``any`` under any schedule are derived anew; those of other classes, whose proof is a
    search, are marked as claimed.
    """
    form = read_json(read_text(path), PlanFile, path)
    chain = chain_of(form.profile, f"{path}: $.profile")
    platform = grouped(platform_of(form.platform, f"{path}: $.platform", chain), chain, f"{path}: $.platform")
    plan = Plan(
        chain=chain,
        platform=platform,
        policy=converted(form.policy, Policy),
        allocation=Allocation(
            tuple(
                replace(
                    Stage(s.start, s.stop, (), s.checkpoint or (), s.tensor, s.selective, s.offloaded),
                    devices=_groups(platform, s.devices, s.tensor, f"{path}: $.stages[{k}]"),
                )
                for k, s in enumerate(form.stages)
            ),
            form.provenance.claimed_period_ns,
        ),
        pattern=None if form.pattern is None else converted(form.pattern, Pattern),
        lower_bounds=tuple(
            replace(bound, claimed=bound.allocation != "any" or bound.schedule is not None)
            for bound in converted(form.lower_bounds, tuple[Bound, ...])
        ),
        provenance=converted(form.provenance, Provenance),
        schedule=converted(form.schedule, Schedule),
    )
    result, found = judged(plan)
    if form.profile.digest != digest(chain):
        found.append(f"profile.digest is {form.profile.digest[:12]}..., its layers give {digest(chain)[:12]}...")
    return plan, found if result is None or found else _figures(form, plan, result)


def _groups(platform: Platform, gpus: tuple[int, ...], tensor: int, place: str) -> tuple[int, ...]:
    """Return the devices that a stage's GPUs are, replica by replica, of ``tensor`` the first; BadInput where they
    aren't whole groups."""
    width = platform.width * tensor
    groups = tuple(gpu // platform.width for gpu in gpus[::width])
    if tuple(gpu for first in groups for d in range(first, first + tensor) for gpu in platform.gpus(d)) != tuple(gpus):
        raise BadInput(f"{place}.devices: {shown(str(list(gpus)), 60)} are no groups of {width} neighbours")
    return groups


def load_plan(path: str) -> Plan:
    """Return the plan in a JSON file; InvalidPlan with every violation when it has any."""
    plan, found = read_plan(path)
    if found:
        raise InvalidPlan([f"{path}: {sentence}" for sentence in found])
    return plan


def _figures(form: Any, plan: Plan, result: Evaluation) -> list[str]:
    """Compare a plan's reported figures with those that follow from its stages and starts: its ``result``."""
    if any_class_bound(plan) is None:
        return ["lower_bounds quotes none of class any"]
    found = []
    for bound in plan.lower_bounds:
        if not bound.claimed:
            found += overstated(bound, derived_up_to(bounded(plan, bound), bound.period_ns))
    expected = plan_form(plan, result)
    source = "the stages and starts give" if plan.pattern is not None else "the simulated run gives"
    for d, (have, want) in enumerate(zip(form.devices, expected.devices, strict=False)):
        for name in DeviceUseFile.__struct_fields__:
            if getattr(have, name) != getattr(want, name):
                found.append(f"devices[{d}].{name} is {getattr(have, name)}; {source} {getattr(want, name)}")
    if len(form.devices) != len(expected.devices):
        found.append(f"devices has {len(form.devices)} entries; the platform has {len(expected.devices)}")
    if (form.groups is None) != (expected.groups is None):
        found.append(f"groups: the schedule has {'no' if expected.groups is None else 'a'} pattern to have any")
    for name in ("groups", "delays"):
        for k, pair in enumerate(zip_longest(getattr(form, name) or (), getattr(expected, name) or ())):
            have, want = (msgspec.json.encode(x).decode() for x in pair)
            if have != want:
                found.append(f"{name}[{k}] is {have}; {source} {want}")
    if form.samples_per_update != expected.samples_per_update:
        found.append(
            f"samples_per_update is {form.samples_per_update}; the policy updates every {plan.interval} microbatches "
            f"of {plan.chain.microbatch}, which is {expected.samples_per_update}"
        )
    if form.gap != expected.gap:
        found.append(f"gap is {form.gap}; the period and the lower bound give {expected.gap}")
    return found
