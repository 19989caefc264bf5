"""What may stand in each file, as JSON Schema?"""

from __future__ import annotations

from typing import Any

import msgspec

from .machines.accelerators import Accelerator
from .machines.platforms import PlatformFile
from .plans import PlanFile
from .profiles import ProfileFile

SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "profile": ProfileFile,
    "platform": PlatformFile,
    "plan": PlanFile,
    "accelerator": Accelerator,
}


def schema(form: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a form, such as one of :data:`SCHEMAS`."""
    return msgspec.json.schema(form)
