"""Is a text what is kept of it? With ``KEEP=1`` it is kept as it is: read the difference before it is committed."""

import os
from pathlib import Path


def check_kept(text: str, path: Path) -> None:
    if os.environ.get("KEEP"):
        path.write_text(text)
    assert text == path.read_text()
