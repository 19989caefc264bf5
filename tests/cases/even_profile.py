"""A small profile as JSON."""

from __future__ import annotations

from typing import Any

LAYERS: list[dict[str, Any]] = [
    {"name": f"l{i}", "forward_ns": 1000000, "backward_ns": 2000000, "weight_bytes": 10**6, "output_bytes": 10**6}
    for i in range(8)
]
PROFILE: dict[str, Any] = {
    "format": "pipeplan-profile/1", "name": "even", "microbatch": 4, "dtype": "float32", "device": "made up",
    "source": "a test", "input_bytes": 10**6, "layers": LAYERS,
}  # fmt: skip
