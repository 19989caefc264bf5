"""What has been found so far on which machine? One JSON file, which can be brought home and given back in."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

State = Literal["good", "failed", "left out", "open", "not reached"]
LEFT_OUT: State = "left out"  # for want of what this machine could have
OPEN: State = "open"  # wants more GPUs or nodes than there are
NOT_REACHED: State = "not reached"
FAILED, INCOMPLETE = 1, 3  # exit codes


def digest() -> str:
    """Return what tells this version of pipeplan and of the checks from others."""
    here = Path(__file__).resolve().parent
    files = sorted([*here.glob("*.py"), *(here.parents[2] / "pipeplan").rglob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def label(kind: str, gpus: int) -> str:
    """Return on what results hold."""
    where = f"{gpus} x {torch.cuda.get_device_name()}" if kind == "cuda" else f"cpu ({os.cpu_count()})"
    return f"{where}, torch {torch.__version__}, pipeplan {digest()}"


@dataclass
class Results:
    """The answers of all parts, by name, with where they are written after each; those ``known`` are kept.

    An answer has state, sentence, seconds, figures, and the label of the machine that it holds for.
    """

    file: Path
    on: str
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take_over(self, known: Path) -> None:
        """Keep what ``known`` has of this machine; of others it has none that count here."""
        found = json.loads(known.read_text())["parts"]
        self.parts |= {name: answer for name, answer in found.items() if answer["on"] == self.on}

    def has_good(self, name: str) -> bool:
        """Whether a part is done."""
        return name in self.parts and self.parts[name]["state"] == "good"

    def put(self, name: str, state: State, sentence: str, **more: Any) -> None:
        """Write down an answer; the file is whole at any time."""
        self.parts[name] = {"state": state, "sentence": sentence, "on": self.on, **more}
        half = self.file.with_suffix(".tmp")
        text = json.dumps({"on": self.on, "summary": self.summary(), "parts": self.parts}, indent=1, default=str)
        half.write_text(text + "\n")
        half.replace(self.file)

    def summary(self) -> Mapping[State, int]:
        """How many parts are in which state."""
        return Counter(answer["state"] for answer in self.parts.values())

    def exit_code(self, names: Iterable[str]) -> int:
        """Return 0 if all of the parts named are good, or open for want of more GPUs."""
        states = {self.parts[name]["state"] for name in names}
        if "failed" in states:
            return FAILED
        return INCOMPLETE if states & {LEFT_OUT, NOT_REACHED} else 0
