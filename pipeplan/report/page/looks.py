"""How does the HTML report look and answer to the mouse? Style and script, inlined so that it opens offline."""

from __future__ import annotations

from pathlib import Path


def style() -> str:
    """Return the page's style sheet."""
    return _beside("page.css")


def script() -> str:
    """Return the page's script, which draws the charts of a constant ``DATA``."""
    return _beside("page.js")


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
