"""Do README, guide, reference and help say things plainly? Short sentences, no forms that readers read twice."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from pipeplan.cli import COMMANDS, group

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "reference").glob("*.md"))]
LONGEST = 25  # words of a sentence
AVOID = {  # form -> why, and what to write
    r"(?<!there )\bis no\b(?! (?:longer|more|better|worse))": "a noun is negated where the verb should be: isn't a",
    r"\bwhat lacks\b|\bthat lacks?\b": "lack needs an object before the reader knows of what: is missing",
    r"\bgo(?:es|ne)? on (?:with|from)\b": "the field's word is resume",
    r"\bmade (?:again|anew)\b": "the field's word is recompute, or derive again",
    r"\bcomes? out\b": "say what happens: is reproduced, is predicted",
    r"\bcomes? to stand\b": "say who moves what: layers may be reordered",
    r"\bso many\b[^.]*\bthat\b": "readers wait for the end of the chain: say the number",
    r"\bby its\b": "say how: from, with, under",
    r"\bat most$": "the limit comes before its noun: at most 3 microbatches",
    r"(?<!--tensor )(?<!tries them )\b(?:each|all)$": "this comes too late for the reader: each stage, all GPUs",
    r"\b(?:says|wants|takes)$": "the verb needs its object",
    r"\bas \w+ as can be\b": "say how good it is, beside what",
    r"\bof one's own\b": "your own",
    r"\bso long as\b": "while, or if",
    r"\bwhat (?:is|was) there\b": "there is not a name: say the thing",
    r"\bthere (?:is|are) none\b": "say what is missing",
    r"\bis none (?:of|that)\b": "isn't one of, doesn't exist",
    r"\bhasn't got\b|\bwhich the \w+ has not\b": "doesn't have",
    r"\bparted\b": "the field's word is split",
    r"\bsays (?:it|one|that already)\b": "an option sets or fixes something",
    r"\bof (?:theirs|ours)\b": "say whose",
    r"\b(?:its|the) begin\b": "its start",
}


def sentences(text: str) -> list[str]:
    """The sentences of a page or a help, code as one word; items of lists and cells of tables are their own."""
    text = re.sub(r"^```(?s:.*?)^```|^    .*$|^#.*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "CODE", text))
    parts = re.split(r"\n\s*\n|\n\s*(?:-|\d+\.) |\||(?<=[.!?:;])\)?\s", text)
    return [" ".join(x.replace("**", "").split()).strip(".;:!?() ") for x in parts if x.strip()]


def forms(text: str) -> list[tuple[str, str]]:
    """The sentences of a text that have a form to avoid, each with the reason."""
    return [(x, why) for x in sentences(text) for form, why in AVOID.items() if re.search(form, x, re.IGNORECASE)]


def faults(text: str) -> list[str]:
    """What is wrong with the sentences of a text, each with the reason."""
    found = [f"{x!r}: {why}" for x, why in forms(text)]
    return found + [f"{x!r}: {len(x.split())} words" for x in sentences(text) if len(x.split()) > LONGEST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_are_plain(page: Path) -> None:
    assert faults(page.read_text()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_plain(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    texts = [command.help or "", COMMANDS[name][1], *(getattr(x, "help", None) or "" for x in command.params)]
    assert [fault for text in texts for fault in faults(text)] == []


def test_errors_are_plain() -> None:
    """Without the sentences' length: names and numbers of the user's are in them."""
    found = []
    for path in sorted((ROOT / "pipeplan").rglob("*.py")):
        for text in re.findall(r'(?:BadInput|Infeasible)\(\s*((?:f?"[^"\n]*"\s*)+)', path.read_text()):
            said = re.sub(r"\{[^{}]*\}", "CODE", "".join(re.findall(r'"([^"]*)"', text)))
            found += [f"{path.name}: {x!r}: {why}" for x, why in forms(said)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "The file is no plan.", "Show what lacks.", "A run stops, and is gone on with.\n\n- Nothing else.",
        "| option | what it takes |\n|---|---|\n| a | 3 at most |", " ".join(["word"] * (LONGEST + 1)),
    ],
)  # fmt: skip
def test_the_check_finds_what_it_is_for(text: str) -> None:
    assert faults(text)
    assert not faults("Stages recompute their activations. " + " ".join(["word"] * LONGEST))
