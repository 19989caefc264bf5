"""The form of every file, as msgspec types: they check JSON on reading, order its keys, and print its JSON Schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ..plan import ScheduleKind
from ..problem import Optimizer, Precision, Weights

Positive = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
Instant = Annotated[int, msgspec.Meta(le=10**18)]  # what is below 0 the validator says in its own words


class LayerFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One layer of a profile: times in ns and sizes in bytes, per microbatch.

    ``saves`` and ``view_of`` name layers by index for their outputs, -1 for the network's input.
    """

    name: str
    forward_ns: int
    backward_ns: int
    weight_bytes: int
    output_bytes: int
    saved_bytes: int | None = None
    saves: tuple[int, ...] | None = None
    view_of: int | None = None
    storage_bytes: int | None = None
    backward_weight_ns: int | None = None
    optimizer_ns: int = 0
    parameters: int | None = None


class ProfileFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A profiled network: a chain, or with ``edges`` a DAG over layer indices."""

    format: Literal["pipeplan-profile/1"]
    name: str
    microbatch: Positive
    dtype: str
    device: str
    source: str
    input_bytes: int
    layers: list[LayerFile]
    edges: list[tuple[int, int]] | None = None
    tied: list[tuple[int, int]] = []


class EmbeddedProfile(ProfileFile, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A profile inside a plan, with the SHA-256 of its own JSON."""

    digest: str


class LevelFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One level of the network, lowest first."""

    count: int
    bandwidth: str
    latency: str | None = None


class DeviceFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What one device has of its own."""

    memory: str | None = None
    speed: float | int | None = None


class PlatformFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Devices and the network that joins them."""

    levels: list[LevelFile]
    memory: str | None = None
    full_duplex: bool = False
    devices: list[DeviceFile] | None = None


class PolicyFile(msgspec.Struct, forbid_unknown_fields=True):
    """How weights and optimizer state are kept."""

    weights: Weights
    accumulate: Positive
    optimizer: Optimizer
    precision: Precision
    offload: bool
    vertical_sync: bool
    bucket_parameters: Positive = 16 * 10**6
    coarsening: Positive | None = None


class StageFile(msgspec.Struct, forbid_unknown_fields=True):
    """One stage; ``checkpoint`` lists the half-open layer ranges that its backward recomputes."""

    start: int
    stop: int
    devices: list[int]
    checkpoint: list[tuple[int, int]] | None


class ScheduleFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How microbatches follow each other."""

    kind: ScheduleKind
    microbatches: Positive | None = None
    limit: Positive | None = None


class OperationFile(msgspec.Struct, forbid_unknown_fields=True):
    """One operation of the pattern."""

    kind: Literal["F", "B", "SEND_F", "SEND_B"]
    stage: int
    start_ns: Instant
    duration_ns: Instant


class PatternFile(msgspec.Struct, forbid_unknown_fields=True):
    """The periodic pattern."""

    period_ns: Instant
    operations: list[OperationFile]


class DeviceUseFile(msgspec.Struct, forbid_unknown_fields=True):
    """Memory of one device in the steady state; ``in_flight`` has one count for each stage on it."""

    memory_bytes: int
    peak_bytes: int
    weights_bytes: int
    activation_bytes: int
    buffer_bytes: int
    in_flight: list[int]


class BoundFile(msgspec.Struct, forbid_unknown_fields=True, rename={"allocation": "class"}):
    """A lower bound on the period, and the class of plans that it holds for."""

    allocation: Literal["contiguous", "one-special", "any"]
    replicas: bool
    checkpointing: Literal["none", "stages", "segments"]
    period_ns: Positive


class ProvenanceFile(msgspec.Struct, forbid_unknown_fields=True):
    """Where the plan comes from."""

    algorithm: str
    options: dict[str, Any]
    claimed_period_ns: int | None
    solver: str | None
    solver_status: str | None
    version: str
    seconds: float


class PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    """A plan; ``gap`` is the period over the lower bound of class ``any``, minus 1."""

    format: Literal["pipeplan-plan/1"]
    profile: EmbeddedProfile
    platform: PlatformFile
    policy: PolicyFile
    stages: list[StageFile]
    schedule: ScheduleFile
    pattern: PatternFile | None
    devices: list[DeviceUseFile]
    lower_bounds: list[BoundFile]
    gap: float
    provenance: ProvenanceFile


SCHEMAS: dict[str, type[msgspec.Struct]] = {"profile": ProfileFile, "platform": PlatformFile, "plan": PlanFile}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of ``profile``, ``platform`` or ``plan``."""
    return msgspec.json.schema(SCHEMAS[name])
