"""README and docs/ are true: every console block runs and prints what it says, and links lead somewhere."""

from __future__ import annotations

import doctest
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from runpy import run_path
from zlib import crc32

import pytest
from cases.patience import SECONDS
from conftest import Command

from pipeplan.api import comparing
from pipeplan.cli import COMMANDS
from pipeplan.files import forms, profile_rules
from pipeplan.files import text as files_text
from pipeplan.files.machines import platforms
from pipeplan.runtime.measure import trace_file
from pipeplan.schedule import kinds
from scripts.studies import pictures

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
BLOCKS = [  # in the order in which they are read: those of a page, and of the README, may use files of earlier ones
    (path.name, block)
    for path in PAGES
    for block in re.findall(r"^```console\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
]
LINES = 150  # of the README: ten minutes


def test_every_command_is_documented() -> None:
    for name in COMMANDS:
        assert f"pipeplan {name}" in README.read_text(), f"README says nothing about pipeplan {name}"


def test_the_first_commands_are_the_two_scripts_and_the_readme_stays_short() -> None:
    commands = re.findall(r"^(?:\$ |    )?((?:scripts/|pipeplan )\S+)", README.read_text(), re.MULTILINE)
    assert commands[:2] == ["scripts/demo", "scripts/test"]
    assert len(README.read_text().splitlines()) <= LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for path in set(re.findall(r"`((?:scripts|profiles|pipeplan|tests)/[\w./-]+)`", text)):
        assert (ROOT / path).exists(), f"{page.name} names {path}, which is not there"
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        linked = (page.parent / target).resolve() if target else page
        assert linked.is_file(), f"{page.name} links to {target}, which is not there"
        text_there = linked.read_text() if anchor else ""
        known = [*map(slug, re.findall(r"^#+ (.*)$", text_there, re.MULTILINE)), *re.findall(r'id="(.*?)"', text_there)]
        assert not anchor or anchor in known, f"{page.name} links to {target}#{anchor}, no heading of it"


def slug(heading: str) -> str:
    """What a heading is called in a link."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_guide_can_be_found_from_the_readme_and_the_other_pages_from_the_guide() -> None:
    linked = links(README)
    assert [page.name for page in PAGES[2:] if page.parent == DOCS and page not in linked] == []
    seen: set[Path] = set()
    while linked - seen:
        page = (linked - seen).pop()
        seen.add(page)
        linked |= links(page)
    assert [page.name for page in PAGES[2:] if page not in linked] == []


def links(page: Path) -> set[Path]:
    """The pages that a page links to."""
    return {(page.parent / x).resolve() for x in re.findall(r"\]\(([\w./-]+\.md)", page.read_text())}


GLOSSARY = re.findall(
    r'^\| <a id="(.*?)"></a>(.*?) \| (.*) \|$', (DOCS / "reference" / "glossary.md").read_text(), re.MULTILINE
)
OWN = {  # words of ours with which others mean something else, or nothing: row of the glossary -> how they are written
    "profile": r"profiles?",
    "platform": r"platforms?",
    "saved-bytes": r"saved\s+bytes",
    "segment": r"segments?",
    "articulation": r"articulation",
    "interval": r"intervals?",
    "host-bound": r"host-bound",
    "allocation": r"allocations?",
    "contiguous": r"(?:non-)?contiguous",
    "in-flight": r"in\s+flight",
    "coarsening": r"coarsening",
    "drain": r"drain(?:s|ed|ing)?",
    "hand-over": r"hand-overs?",
    "makespan": r"makespans?",
    "pattern": r"patterns?",
    "period": r"periods?",
    "index-shift": r"index\s+shifts?",
    "lower-bound": r"(?:lower\s+)?bounds?",
    "gap": r"gaps?",
    "auto": r"portfolio",
    "grid": r"grids?",
    "vertical-sync": r"vertical\s+sync",
}
OF_OTHERS = {  # the same words, meant otherwise: tensors, MadPipe's values, a column
    ("models.md", "contiguous"),
    ("tried.md", "contiguous"),
    ("madpipe.md", "grid"),
    ("benchmarks.md", "grid"),
}


def test_the_glossary_explains_each_word_once_by_those_above_it() -> None:
    terms = [word.replace("\\*", "").split(", ") for _, word, _ in GLOSSARY]
    assert len({anchor for anchor, _, _ in GLOSSARY}) == len(GLOSSARY) > 50
    for place, (_, word, meaning) in enumerate(GLOSSARY):
        text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", meaning)
        below = {term for found in terms[place + 1 :] for term in found} - set(terms[place])
        used = [x for x in below if re.search(rf"(?<![\w-]){re.escape(x)}s?(?![\w-])", text, re.IGNORECASE)]
        assert used == [], f"{word} is explained by {used}"


@pytest.mark.parametrize(
    "page", [x for x in PAGES if x.name not in ("cli.md", "glossary.md", "CONTRIBUTING.md")], ids=lambda page: page.name
)
def test_no_word_of_ours_comes_before_its_meaning(page: Path) -> None:
    """Where a page first has it it is a link, such as to the glossary, or bold, where it is explained."""
    text = prose(page.read_text())
    unsaid = []
    for anchor, written in OWN.items():
        found = re.search(rf"(?<![\w-])(?:{written})(?![\w-])", text, re.IGNORECASE)
        if found is not None and (page.name, anchor) not in OF_OTHERS:
            before = text[text.rfind("\n\n", 0, found.start()) + 1 : found.start()]
            linked = re.search(r"\[[^\]]*$", before) and re.match(r"[^\[\]]*\]\(", text[found.end() :])
            if not linked and before.count("**") % 2 == 0:
                unsaid.append(f"{found[0]}: [{found[0]}](glossary.md#{anchor})")
    assert unsaid == []
    assert set(OWN) <= {anchor for anchor, _, _ in GLOSSARY}


def test_the_page_of_limits_has_the_limits() -> None:
    rows = re.findall(r"^\| (.*?) \| ([\d,]+)", (DOCS / "reference" / "limits.md").read_text(), re.MULTILINE)
    said = {name.split("(")[0].split(", `")[0].strip(): int(value.replace(",", "")) for name, value in rows}
    assert said == {
        "a file or standard input": files_text.MOST_BYTES // 10**6,
        "the trace of a run, or a [profile]": trace_file.MOST_BYTES // 10**6,
        "layers of a profile": profile_rules.MOST_LAYERS,
        "edges of a profile": profile_rules.MOST_EDGES,
        "layers of a profile with edges": profile_rules.MOST_LAYERS_WITH_EDGES,
        "a name, or where something comes from": forms.MOST_LETTERS,
        "devices of a [platform]": platforms.MOST_DEVICES,
        "cases of `compare` without a time limit": comparing.MOST_CASES,
        "steps of one simulated run, which also judges [drained]": kinds.MOST_STEPS,
    }


def test_the_package_has_the_page_for_agents() -> None:
    assert (ROOT / "pipeplan" / "SKILL.md").read_text() == (DOCS / "agents.md").read_text()


def test_pictures_are_what_plans_do_and_stand_in_pages() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for name, text in pictures.pictures().items():
        assert (DOCS / "images" / name).read_text() == text, "python -m scripts.studies.pictures docs/images"
        assert f"images/{name})" in pages


def prose(text: str) -> str:
    """A page's sentences and tables, without code, headings, and what links lead to."""
    for pattern in (r"(?s)^```.*?^```", r"^    .*$", r"^#.*$", r"`[^`]+`", r"(?<=\]\()[^)]*"):
        text = re.sub(pattern, "", text, flags=re.MULTILINE)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the checkout to the blocks, which share it, with the modules that pages show."""
    made = tmp_path_factory.mktemp("docs")
    for name in ("profiles", "scripts"):
        (made / name).symlink_to(ROOT / name)
    for page in PAGES:
        scripts = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for name, code in scripts:
            (made / name).write_text(code)
    return made


@pytest.mark.parametrize("page", [page for page in PAGES if "```pycon" in page.read_text()], ids=lambda page: page.name)
def test_python_sessions_print_what_they_say(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if "import torch" in page.read_text():
        pytest.importorskip("torch")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(page.read_text(), {}, page.name, str(page), 0)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert said == [], "".join(said)


def test_the_readmes_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (code,) = re.findall(r"^```python\n(import pipeplan.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    exec(code)


WRITTEN = re.compile(r"(?:(?:-o|--trace|--recalibrated|--checkpoint) |> (?=\w+\.(?:json|csv|sh)\b))(\w[\w.]*)")


YOURS = {  # files in blocks that readers make themselves: what the page says of them stands beside the block
    "estimate.md": {"mb1.json", "mb2.json", "mb4.json", "runs.csv"},  # zoo:gpt2-xl, which takes minutes
    "unequal.md": {"h100.json"},  # in the text of a platform
    "gpus.md": {"more.json", "results.json"},  # of a machine with GPUs
}


@pytest.mark.parametrize("page", [x for x in PAGES if x.name != "cli.md"], ids=lambda page: page.name)
def test_every_file_that_a_block_names_is_made_by_one(page: Path) -> None:
    made = {name for _, block in BLOCKS for name in WRITTEN.findall(block)}
    made |= set(re.findall(r'Path\("([\w.]+)"\)', page.read_text()))
    text = re.sub(r"^```py.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```\w*\n(.*?)^```|((?:^    [^-\s][^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<![\w/.$-])[\w-]+\.(?:json|csv|sh|toml|safetensors)\b", str(blocks)))
    assert named - made - YOURS.get(page.name, set()) == set()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Where the processes that share the blocks find what others have written; None where one runs them all."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    made = tmp_path_factory.getbasetemp().parent / "written"
    made.mkdir(exist_ok=True)
    return made


@contextmanager
def nobody_else(block: str, written: Path | None) -> Iterator[None]:
    """Let no other process run a block that writes something meanwhile."""
    if written is None or not WRITTEN.search(block):
        yield
        return
    with (written / f".{crc32(block.encode())}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def take_written(folder: Path, written: Path | None) -> None:
    """Copy to ``folder`` what other processes have written and is not there."""
    for path in () if written is None else written.glob("[!.]*"):
        if not (folder / path.name).exists():
            shutil.copy(path, folder)


def give_written(block: str, folder: Path, written: Path | None) -> None:
    """Copy what ``block`` has written to where other processes find it, whole."""
    for name in WRITTEN.findall(block):
        if written is not None and (folder / name).is_file():
            mine = shutil.copy(folder / name, written / f".{os.environ['PYTEST_XDIST_WORKER']}-{name}")
            os.replace(mine, written / name)


def blocks_before(block: str, folder: Path) -> list[str]:
    """The earlier blocks that write what ``block`` reads and is not there: another process may run them."""
    lacking = {name for name in re.findall(r"[\w.]+", block) if not (folder / name).exists()}
    texts = [text for _, text in BLOCKS]
    found = [x for x in texts[: texts.index(block)] if lacking.intersection(WRITTEN.findall(x))]
    return [y for x in found for y in [*blocks_before(x, folder), x]]


@pytest.mark.parametrize(
    "block", [x for _, x in BLOCKS], ids=[f"{page}: {x.splitlines()[0][2:60]}" for page, x in BLOCKS]
)
def test_console_blocks_print_what_they_say(
    block: str, folder: Path, written: Path | None, pipeplan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines after ``$ `` are commands; what follows is their output, where ``...`` stands for anything."""
    monkeypatch.chdir(folder)
    for each in dict.fromkeys([*blocks_before(block, folder), block]):
        with nobody_else(each, written):
            take_written(folder, written)
            if each == block or not all((folder / name).exists() for name in WRITTEN.findall(each)):
                check_block(each, pipeplan, monkeypatch)
                give_written(each, folder, written)


def check_block(block: str, pipeplan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        both = command.endswith(" 2>&1")
        words, bar, reader = command.removesuffix(" 2>/dev/null").removesuffix(" 2>&1").partition(" | ")
        code, out, said = 0, None, ""
        if re.match(r"pipeplan [^|&;<>$*`]*$", words):  # which needs no shell, and no process that imports all again
            with monkeypatch.context() as context:
                context.setattr(sys, "stderr", sys.stdout if both else sys.stderr)
                code, out, said = pipeplan(*shlex.split(words)[1:])
        elif re.match(r"python \w+\.py$", words):
            with redirect_stdout(StringIO()) as printed, monkeypatch.context() as context:
                context.setattr(sys, "argv", shlex.split(words)[1:])
                run_path(words.split()[1], run_name="__main__")
            out = printed.getvalue()
        else:
            bar, reader = "shell", command
        if bar:
            done = subprocess.run(
                reader, shell=True, env=environment, input=out, capture_output=True, text=True, timeout=SECONDS
            )
            code, out = done.returncode, done.stdout
            said += re.sub(r"^ *[\d.]+ s  .*\n", "", done.stderr, flags=re.MULTILINE)  # progress depends on the load
        got = (out or "") + (said if code else "")
        assert checker.check_output(wanted, got, flags), f"$ {command}\nthe page says:\n{wanted}\nit prints:\n{got}"
