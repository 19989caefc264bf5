"""What is installed: every file that the program reads, one version, and what the metadata says."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from cases.patience import SECONDS

from pipeplan.runtime import surroundings
from pipeplan.version import __version__
from scripts import site_pages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_all_files_of_the_package_are_in_a_wheel():
    """scripts/checks/wheel.py builds one and tries it; here only what would be left out."""
    package = ROOT / "pipeplan"
    shipped = PROJECT["tool"]["setuptools"]["package-data"]["pipeplan"]
    others = [
        path.relative_to(package).as_posix()
        for place in (package, package / "profiles")  # a link, which rglob doesn't follow
        for path in place.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "README.md"
    ]
    assert any(name.startswith("profiles/published/") for name in others)
    assert [name for name in others if not any(fnmatch(name, pattern) for pattern in shipped)] == []


def test_there_is_one_version_and_it_says_whether_it_is_released():
    """A checkout between releases is of the next one's development, so that plans tell what made them."""
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", __version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pipeplan.version.__version__"}
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    released, _, state = newest.partition(", ")
    assert released == __version__.removesuffix(".dev0")
    assert (state == "not yet released") == __version__.endswith(".dev0")
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_metadata_names_what_is_there():
    project = PROJECT["project"]
    assert project["license"] == "MIT"
    assert all((ROOT / name).is_file() for name in [*project["license-files"], project["readme"]])
    lowest = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in project["classifiers"]
    pinned = re.search(r"torch==(\d+\.\d+)", (ROOT / "scripts" / "environment").read_text())[1]
    (needs,) = project["optional-dependencies"]["torch"]
    assert re.fullmatch(r"torch>=\d+\.\d+", needs), "an upper bound would let pip take an installed one away"
    low = needs.removeprefix("torch>=")
    assert tuple(map(int, low.split("."))) <= tuple(map(int, pinned.split(".")))
    limits = (ROOT / "docs" / "reference" / "limits.md").read_text()
    assert f"pipeplan takes torch {low} and later. All tests run with {pinned};" in limits
    assert pinned == surroundings.TRIED


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_of_the_classifiers_compiles_all_files(version):
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"), Path(f"/usr/bin/python{version}")]
    python = next((path for path in found if path.exists()), None)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    code = "import pathlib, sys; [compile(x.read_text(), x, 'exec') for x in map(pathlib.Path, sys.argv[1:])]"
    files = map(str, (ROOT / "pipeplan").rglob("*.py"))
    subprocess.run([str(python), "-W", "error", "-c", code, *files], check=True, timeout=SECONDS)


def test_another_torch_is_called_untried():
    assert surroundings.untried(f"{surroundings.TRIED}.0+cpu") is None
    assert surroundings.untried("2.15.1") == f"torch 2.15.1 is untried: pipeplan's tests run with {surroundings.TRIED}"


def test_a_source_distribution_is_whole():
    """Whoever has it can do what a checkout can: read, test, and build the same wheel."""
    lines = [line.split(maxsplit=1) for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    named = {name for _, names in lines for name in names.split()} | {"pipeplan", "pyproject.toml", "README.md"}
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert {name.split("/")[0] for name in files} - named - {".gitignore", ".mkdocs.yml", "MANIFEST.in"} == set()


def test_the_site_has_every_page_and_links_of_it():
    """`mkdocs build --strict` says more, where it is installed."""
    docs = ROOT / "docs"
    site = (ROOT / ".mkdocs.yml").read_text()
    listed = set(re.findall(r"^ +- (\S+\.md)$", site, re.MULTILINE))
    assert listed == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} | set(site_pages.PAGES.values())
    for name in site_pages.PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", site_pages.page(name)):
            assert (docs / link).exists() or link in listed, f"{name}: {link}"
