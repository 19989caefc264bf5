"""What others chose to call things is text: one line, nothing that acts, nothing too long, told apart by its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.dom import minidom

import pytest
from cases.even_profile import PROFILE
from cases.files import edited, written
from cases.patience import SECONDS
from conftest import Command

from pipeplan.names import SENTENCE, shown
from pipeplan.report.looks import LAYER_WIDTH

HOSTILE = "\x1b[31mred\x9b1m\x7f\n\r\t\x00\u202egnp\u2066[bold]b[/][/bold]:warning:$\\frac{$<b>'\"é模\U000e0001"
SMALL = ["--gpus", "2", "--mem", "1GB", "--no-replicas"]


def test_what_does_not_print_is_escaped_and_what_prints_stays():
    assert shown("a\nb\x1b[0m\t\x9b\u202e\U000e0001") == "a\\nb\\x1b[0m\\t\\x9b\\u202e\\U000e0001".replace(
        "U000E", "U000e"
    )
    assert shown("conv.é模 [bold]\\n") == "conv.é模 [bold]\\n"
    assert shown(shown(HOSTILE)) == shown(HOSTILE)
    assert shown(HOSTILE, 1000).isprintable()


def test_long_names_are_cut_in_the_middle_and_stay_apart():
    names = [f"bert.encoder.layer.{i}.attention.self.{part}" for i in (0, 1) for part in ("query", "key", "value")]
    assert len({shown(name, LAYER_WIDTH) for name in names}) == 6
    assert all(len(shown(name, LAYER_WIDTH)) <= LAYER_WIDTH < len(name) for name in names)
    assert [shown(names[0], n) for n in (3, 10, 11)] == ["…ry", "ber….query", "ber…f.query"]
    assert len(shown("x" * 10**7 + "end")) == 60
    assert shown("x" * 10**7 + "end").endswith("xend")
    assert shown("x" * 60) == "x" * 60


class Words(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def hostile_profile() -> dict[str, object]:
    layers = [layer | {"name": f"{HOSTILE}{i}"} for i, layer in enumerate(PROFILE["layers"])]
    return PROFILE | dict.fromkeys(("name", "dtype", "device", "source"), HOSTILE) | {"layers": layers}


@pytest.fixture
def plan(tmp_path: Path, pipeplan: Command) -> str:
    path = str(tmp_path / "plan.json")
    assert pipeplan("plan", written(tmp_path, hostile_profile(), "a.json"), *SMALL, "-o", path)[0] == 0
    return path


def test_hostile_names_are_text_in_every_table_and_export(tmp_path: Path, plan: str, pipeplan: Command) -> None:
    profile = str(tmp_path / "a.json")
    slower = written(tmp_path, edited(hostile_profile(), ("layers", 3, "forward_ns"), 10**7), "b.json")
    commands = [
        ["plan", profile, *SMALL], ["plan", profile, *SMALL, "--json"],
        ["plan", profile, "--gpus", "2", "--mem", "1MB"],
        ["compare", profile, "--gpus", "2", "--mem", "1GB", "--algorithms", "contiguous"],
        ["diff", profile, slower, "--plan", plan], ["diff", slower, profile, "--plan", plan], ["check", plan],
        ["show", plan], ["show", plan, "--json"], ["simulate", plan, "--trace", "-"], ["report", plan, "-o", "-"],
        *(["export", plan, "--to", target] for target in ("torchtitan", "megatron", "deepspeed")),
        ["check", written(tmp_path, json.loads(Path(plan).read_text()) | {HOSTILE: 1})],
        ["show", HOSTILE.replace("\x00", "")], ["plan", profile, "--gpus", "2", "--mem", HOSTILE],
        ["plan", profile, f"--{HOSTILE}"], ["run", plan, "--dry-run", "--model", f"a:{HOSTILE}"],
    ]  # fmt: skip
    for command in commands:
        code, out, err = pipeplan(*command)
        assert code in (0, 1, 2), command
        strange = {sign for sign in out + err if not sign.isprintable()} - {"\n"}
        assert not strange, (command, strange)
        if command[0] in ("plan", "compare", "diff") and code == 0 and "--json" not in command:
            assert ":warning:$\\frac{$<b>'\"é模" in out, "no markup, no emoji, and the end of the name"
    page = Words(pipeplan("report", plan, "-o", "-")[1])
    assert "b" in page.tags, "of the cards"
    assert any("<b>'\"é模" in word for word in page.words)
    for name in ("show.svg", "show.png"):
        assert pipeplan("show", plan, "-o", str(tmp_path / name))[0] == 0
    assert minidom.parse(str(tmp_path / "show.svg")).documentElement is not None


def test_escaped_json_says_the_same(tmp_path: Path, plan: str) -> None:
    text = Path(plan).read_text()
    assert all(line.isprintable() for line in text.splitlines())
    assert [x["name"] for x in json.loads(text)["profile"]["layers"]] == [f"{HOSTILE}{i}" for i in range(8)]


def test_a_message_keeps_its_beginning_and_its_end(tmp_path: Path, plan: str, pipeplan: Command) -> None:
    huge = json.loads(Path(plan).read_text()) | {"x" * 10**6: 1}
    path = written(tmp_path, huge, "huge.json")
    code, _, err = pipeplan("check", path)
    assert code == 2
    assert len(err) <= SENTENCE + len("error: \n")
    assert err.startswith(f"error: {path}: object contains unknown field `xxx")
    assert err.endswith("xxx`\n")


def test_a_terminal_without_the_letters_gets_their_codes(tmp_path: Path) -> None:
    """Those of JSON, so that documents stay what they are; what comes in is UTF-8, as in every file."""
    profile = Path(written(tmp_path, PROFILE | {"name": "é模😀"}))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}

    def said(*more: str) -> bytes:
        line = [sys.executable, "-m", "pipeplan", "plan", "-", *SMALL, *more]
        with profile.open("rb") as file:
            done = subprocess.run(line, stdin=file, capture_output=True, env=environment, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        assert b"rror" not in done.stderr  # progress may be there
        return done.stdout

    assert said().startswith(rb"\u00e9\u6a21\ud83d\ude00: 8 layers")
    assert json.loads(said("--json"))["profile"]["name"] == "é模😀"
