"""What is installed: every file that the program reads, one version, and what the metadata says."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

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
    bounds = re.findall(r"\d+\.\d+", project["optional-dependencies"]["torch"][0])
    low, high = (tuple(map(int, x.split("."))) for x in bounds)
    assert low <= tuple(map(int, pinned.split("."))) < high  # what is tried is let in
    said = f"pipeplan takes torch {bounds[0]} to {high[0]}.{high[1] - 1}. All tests run with {pinned}."
    assert said in (ROOT / "docs" / "reference" / "limits.md").read_text()


def test_the_site_has_every_page_and_links_of_it():
    """`mkdocs build --strict` says more, where it is installed."""
    docs = ROOT / "docs"
    site = (ROOT / ".mkdocs.yml").read_text()
    listed = set(re.findall(r"^ +- (\S+\.md)$", site, re.MULTILINE))
    assert listed == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} | set(site_pages.PAGES.values())
    for name in site_pages.PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", site_pages.page(name)):
            assert (docs / link).exists() or link in listed, f"{name}: {link}"
