"""What may stand in each file, as JSON Schema?"""

from __future__ import annotations

from typing import Any

import msgspec

from .plans import PlanFile
from .platforms import PlatformFile
from .profiles import ProfileFile

SCHEMAS: dict[str, type[msgspec.Struct]] = {"profile": ProfileFile, "platform": PlatformFile, "plan": PlanFile}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of ``profile``, ``platform`` or ``plan``."""
    return msgspec.json.schema(SCHEMAS[name])
