"""The files: profiles, platforms and plans as JSON, checked against their schemas and written atomically.

Reading never trusts a file: shapes and types are checked by msgspec, values by the model, and a plan's reported figures
are recomputed. Unknown keys are refused.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..check.bounds import any_bound
from ..check.evaluate import Evaluation, evaluate, gap
from ..check.validate import violations
from ..errors import BadInput, InvalidPlan
from ..plan import Allocation, Bound, Pattern, Plan, Provenance, Schedule, Stage, TimedOp
from ..problem import Chain, Device, Layer, Level, Platform, Policy, Problem
from ..units import exact_bandwidth, exact_bytes, exact_time, parse_bandwidth, parse_bytes, parse_time
from .graph_txt import read_graph_text
from .profile_rules import check_chain
from .schemas import (
    BoundFile,
    DeviceFile,
    DeviceUseFile,
    EmbeddedProfile,
    LayerFile,
    LevelFile,
    OperationFile,
    PatternFile,
    PlanFile,
    PlatformFile,
    PolicyFile,
    ProfileFile,
    ProvenanceFile,
    ScheduleFile,
    StageFile,
)

Form = TypeVar("Form", bound=msgspec.Struct)


# --- reading and writing ---------------------------------------------------------------------------------------------


def read_text(path: str) -> str:
    """Return the text of a file, or of standard input for ``-``; BadInput when it cannot be read as UTF-8."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        text.encode()  # in some locales standard input lets other bytes through as lone surrogates
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"{path}: cannot be read: {reason}") from error
    return text.removeprefix("\ufeff")


def write_text(path: str, text: str) -> None:
    """Write a file atomically (a reader sees the old one or the new one), or standard output for ``-``.

    Links are followed; what is no regular file, such as a pipe or ``/dev/null``, is written to and not replaced.
    """
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _decode(text: str, form: type[Form], place: str) -> Form:
    try:
        return msgspec.json.decode(text.encode(), type=form)
    except msgspec.MsgspecError as error:  # malformed JSON and validation errors alike
        said = str(error)
        raise BadInput(f"{place}: {said if said.startswith('JSON') else said[0].lower() + said[1:]}") from error
    except RecursionError as error:
        raise BadInput(f"{place}: JSON is nested too deeply") from error


def _encode(form: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(form), indent=1).decode() + "\n"


# --- profiles --------------------------------------------------------------------------------------------------------


def read_profile(path: str) -> Chain:
    """Return the chain in a profile: this project's JSON, or PipeDream's ``graph.txt``."""
    text = read_text(path)
    if not text.strip():
        raise BadInput(f"{path}: is empty; a profile is JSON or a graph.txt")
    if text.lstrip()[0] in "{[":
        return chain_of(_decode(text, ProfileFile, path), path)
    return read_graph_text(text, Path(path).name.split(".")[0], path)


def chain_of(form: ProfileFile, place: str) -> Chain:
    """Return the chain of a profile's file form, its values checked; errors start with ``place``."""
    chain = Chain(
        name=form.name,
        layers=tuple(Layer(**msgspec.structs.asdict(layer)) for layer in form.layers),
        input_bytes=form.input_bytes,
        edges=None if form.edges is None else tuple(sorted(set(form.edges))),
        tied=tuple(form.tied),
        microbatch=form.microbatch,
        dtype=form.dtype,
        device=form.device,
        source=form.source,
    )
    try:
        check_chain(chain, lambda i: f"$.layers[{i}]")
    except BadInput as error:
        raise BadInput(f"{place}: {error}") from None
    return chain


def profile_form(chain: Chain) -> ProfileFile:
    """Return the file form of a chain."""
    return ProfileFile(**_profile_fields(chain))


def _profile_fields(chain: Chain) -> dict[str, Any]:
    return {
        "format": "pipeplan-profile/1",
        "name": chain.name,
        "microbatch": chain.microbatch,
        "dtype": chain.dtype,
        "device": chain.device,
        "source": chain.source,
        "input_bytes": chain.input_bytes,
        "layers": [
            LayerFile(**{name: getattr(layer, name) for name in LayerFile.__struct_fields__}) for layer in chain.layers
        ],
        "edges": None if chain.edges is None else list(chain.edges),
        "tied": list(chain.tied),
    }


def profile_text(chain: Chain) -> str:
    """Return the JSON of a chain."""
    return _encode(profile_form(chain))


def digest(chain: Chain) -> str:
    """Return the SHA-256 of a chain's compact JSON, in hexadecimal."""
    return hashlib.sha256(msgspec.json.encode(profile_form(chain))).hexdigest()


# --- platforms -------------------------------------------------------------------------------------------------------


def read_platform(path: str) -> Platform:
    """Return the platform in a JSON file."""
    return platform_of(_decode(read_text(path), PlatformFile, path), path)


def platform_of(form: PlatformFile, place: str) -> Platform:
    """Return the platform of its file form, its values checked; errors start with ``place``."""
    if not form.levels:
        raise BadInput(f"{place}: $.levels: is empty; a platform has at least one level")
    count = 1
    levels = []
    for k, level in enumerate(form.levels):
        here = f"{place}: $.levels[{k}]"
        if not 1 <= level.count <= 2**20:
            raise BadInput(f"{here}.count: {level.count} is not between 1 and {2**20}")
        count *= level.count
        latency = parse_time(level.latency, f"{here}.latency") if level.latency is not None else 0
        levels.append(Level(level.count, parse_bandwidth(level.bandwidth, f"{here}.bandwidth"), latency))
    if count > 2**20:
        raise BadInput(f"{place}: $.levels: the counts multiply to {count} devices; at most {2**20}")
    entries = form.devices if form.devices is not None else [DeviceFile()] * count
    if len(entries) != count:
        raise BadInput(f"{place}: $.devices: lists {len(entries)} devices; the levels' counts multiply to {count}")
    devices = []
    for d, entry in enumerate(entries):
        here = f"{place}: $.devices[{d}]"
        if entry.memory is None and form.memory is None:
            raise BadInput(f"{place}: device {d} has no memory: neither $.memory nor $.devices[{d}].memory is given")
        memory = (
            parse_bytes(entry.memory, f"{here}.memory")
            if entry.memory is not None
            else parse_bytes(form.memory or "", f"{place}: $.memory")
        )
        given = Fraction(1) if entry.speed is None else Fraction(str(entry.speed))
        speed = given.limit_denominator(1000)  # so that 2/3, written as a decimal, comes back
        if not Fraction(1, 1000) <= given <= 1000 or float(speed) != float(given):
            raise BadInput(
                f"{here}.speed: {entry.speed} is not between 0.001 and 1000 with at most three decimals "
                "(or a fraction of whole numbers up to 1000)"
            )
        devices.append(Device(memory, speed))
    return Platform(tuple(devices), tuple(levels), form.full_duplex)


def platform_form(platform: Platform) -> PlatformFile:
    """Return the file form of a platform; one ``memory`` when all devices are equal and of speed 1."""
    levels = [
        LevelFile(x.count, exact_bandwidth(x.bandwidth), exact_time(x.latency_ns) if x.latency_ns else None)
        for x in platform.levels
    ]
    first = platform.devices[0]
    if all(device == first for device in platform.devices) and first.speed == 1:
        return PlatformFile(levels, exact_bytes(first.memory_bytes), platform.full_duplex)
    return PlatformFile(
        levels,
        None,
        platform.full_duplex,
        [DeviceFile(exact_bytes(x.memory_bytes), None if x.speed == 1 else float(x.speed)) for x in platform.devices],
    )


# --- plans -----------------------------------------------------------------------------------------------------------


def plan_text(plan: Plan, result: Evaluation | None = None) -> str:
    """Return the JSON of a valid plan, with the figures that its stages and starts give: ``result``, or computed."""
    return _encode(plan_form(plan, result))


def plan_form(plan: Plan, result: Evaluation | None = None) -> PlanFile:
    """Return the file form of a plan that has passed the validator; ``result`` is its evaluation if there is one."""
    result = result or evaluate(plan)
    policy, bound = plan.policy, any_of(plan.lower_bounds)
    assert bound is not None
    return PlanFile(
        format="pipeplan-plan/1",
        profile=EmbeddedProfile(**_profile_fields(plan.chain), digest=digest(plan.chain)),
        platform=platform_form(plan.platform),
        policy=PolicyFile(
            policy.weights,
            policy.accumulate or 1,
            policy.optimizer,
            policy.precision,
            policy.offload,
            policy.vertical_sync,
            policy.bucket_parameters,
            policy.coarsening,
        ),
        stages=[
            StageFile(s.start, s.stop, list(s.devices), list(s.checkpoint) or None) for s in plan.allocation.stages
        ],
        schedule=ScheduleFile(plan.schedule.kind, plan.schedule.microbatches, plan.schedule.limit),
        pattern=None
        if plan.pattern is None
        else PatternFile(
            plan.pattern.period_ns,
            [OperationFile(op.kind, op.stage, op.start_ns, op.duration_ns) for op in plan.pattern.operations],
        ),
        devices=[
            DeviceUseFile(
                use.memory_bytes,
                use.peak_bytes,
                use.weights_bytes,
                use.activation_bytes,
                use.buffer_bytes,
                list(use.in_flight),
            )
            for use in result.devices
        ],
        lower_bounds=[BoundFile(b.allocation, b.replicas, b.checkpointing, b.period_ns) for b in plan.lower_bounds],
        gap=gap(result.period_ns, bound),
        provenance=ProvenanceFile(
            plan.provenance.algorithm,
            plan.provenance.options,
            plan.provenance.claimed_period_ns,
            plan.provenance.solver,
            plan.provenance.solver_status,
            plan.provenance.version,
            plan.provenance.seconds,
        ),
    )


def any_of(bounds: tuple[Bound, ...]) -> Bound | None:
    """Return the bound of class ``any``, which every plan quotes."""
    return next((bound for bound in bounds if bound.allocation == "any"), None)


def read_plan(path: str) -> tuple[Plan, list[str]]:
    """Return the plan in a JSON file and every violation: rules broken, and reported figures that don't follow.

    BadInput when the file isn't a plan at all. Figures are compared only when the rules hold; without that they have
    no meaning.
    """
    form = _decode(read_text(path), PlanFile, path)
    chain = chain_of(
        ProfileFile(**{f: getattr(form.profile, f) for f in ProfileFile.__struct_fields__}), f"{path}: $.profile"
    )
    plan = Plan(
        chain=chain,
        platform=platform_of(form.platform, f"{path}: $.platform"),
        policy=Policy(**msgspec.structs.asdict(form.policy)),
        allocation=Allocation(
            tuple(Stage(s.start, s.stop, tuple(s.devices), tuple(s.checkpoint or ())) for s in form.stages),
            form.provenance.claimed_period_ns,
        ),
        pattern=None
        if form.pattern is None
        else Pattern(
            form.pattern.period_ns,
            tuple(TimedOp(op.kind, op.stage, op.start_ns, op.duration_ns) for op in form.pattern.operations),
        ),
        lower_bounds=tuple(Bound(b.allocation, b.replicas, b.checkpointing, b.period_ns) for b in form.lower_bounds),
        provenance=Provenance(**msgspec.structs.asdict(form.provenance)),
        schedule=Schedule(form.schedule.kind, form.schedule.microbatches, form.schedule.limit),
    )
    found = violations(plan)
    if form.profile.digest != digest(chain):
        found.append(f"profile.digest is {form.profile.digest[:12]}..., its layers give {digest(chain)[:12]}...")
    return plan, found or _figures(form, plan)


def load_plan(path: str) -> Plan:
    """Return the plan in a JSON file; InvalidPlan with every violation when it has any."""
    plan, found = read_plan(path)
    if found:
        raise InvalidPlan([f"{path}: {sentence}" for sentence in found])
    return plan


def _figures(form: PlanFile, plan: Plan) -> list[str]:
    """Compare a plan's reported figures with those that follow from its stages and starts."""
    if any_of(plan.lower_bounds) is None:
        return ["lower_bounds quotes none of class any"]
    found = []
    for bound in plan.lower_bounds:
        if bound.allocation == "any":
            allowed = Problem(plan.chain, plan.platform, plan.policy, bound.replicas, bound.checkpointing)
            derived = any_bound(allowed).period_ns
            if bound.period_ns > derived:
                found.append(
                    f"lower_bounds: {bound.period_ns} ns of class any is more than can be derived ({derived} ns)"
                )
    expected = plan_form(plan)
    source = "the stages and starts give" if plan.pattern is not None else "the simulated run gives"
    for d, (have, want) in enumerate(zip(form.devices, expected.devices, strict=False)):
        for name in DeviceUseFile.__struct_fields__:
            if getattr(have, name) != getattr(want, name):
                found.append(f"devices[{d}].{name} is {getattr(have, name)}; {source} {getattr(want, name)}")
    if len(form.devices) != len(expected.devices):
        found.append(f"devices has {len(form.devices)} entries; the platform has {len(expected.devices)}")
    if form.gap != expected.gap:
        found.append(f"gap is {form.gap}; the period and the lower bound give {expected.gap}")
    return found
