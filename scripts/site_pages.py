"""A hook of .mkdocs.yml: the README is the site's first page, and CONTRIBUTING and CHANGELOG are pages of it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def page(name: str) -> str:
    """Return a file of the checkout with its links as they are seen from the site's folder."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for source, target in PAGES.items():
        text = text.replace(f"]({source})", f"]({target})")
    return text


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those of docs/."""
    from mkdocs.structure.files import File

    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=page(source)))
    return files
