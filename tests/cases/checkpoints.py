"""Checkpoints that were changed by hand, with or without the checksums that such contents would have had."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

ABOUT = "run.json"


def reworded(checkpoint, **changes):
    """Change fields of a checkpoint's ``run.json`` as if it had been written so, its own checksum included."""
    path = Path(checkpoint, ABOUT)
    said = json.loads(path.read_text()) | changes | {"crc32": 0}
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False)
    path.write_text(json.dumps(said | {"crc32": zlib.crc32(text.encode())}))


def resummed(checkpoint):
    """Let ``run.json`` have the sizes and checksums of the files that are there."""
    files = json.loads(Path(checkpoint, ABOUT).read_text())["files"]
    found = {name: Path(checkpoint, name).read_bytes() for name in files}
    reworded(checkpoint, files={name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in found.items()})
