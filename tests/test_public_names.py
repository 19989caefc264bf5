"""What ``from pipeplan import ...`` gives, and that asking for nothing loads nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from cases.patience import SECONDS

import pipeplan

SOURCE = Path(pipeplan.__file__).read_text()


def names_for_type_checkers():
    """Name -> home, as the imports say that only type checkers see."""
    return {
        alias.asname: node.module
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.ImportFrom) and node.level and node.module != "version"
        for alias in node.names
        if alias.asname
    }


def test_type_checkers_see_the_names_that_there_are():
    assert names_for_type_checkers() == pipeplan._HOMES
    assert sorted({"__version__", *pipeplan._HOMES}) == dir(pipeplan) == sorted(pipeplan.__all__)


@pytest.mark.parametrize("name", pipeplan._HOMES)
def test_each_name_is_what_its_home_calls_so(name):
    """Functions behind the door that checks their keywords."""
    if pipeplan._HOMES[name].startswith("runtime"):
        pytest.importorskip("torch")
    home = __import__(f"pipeplan.{pipeplan._HOMES[name]}", fromlist=[name])
    found = getattr(pipeplan, name)
    assert found is getattr(pipeplan, name)
    assert getattr(found, "__wrapped__", found) is getattr(home, name)
    assert isinstance(found, type) != hasattr(found, "__wrapped__")


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="module 'pipeplan' has no attribute 'nothing'"):
        pipeplan.nothing  # noqa: B018  # to ask for it is the test
    with pytest.raises(ImportError, match="nothing"):
        exec("from pipeplan import nothing")


def test_the_package_is_imported_at_once():
    """Nothing is loaded before a name is used, not even numpy, nor any of the package's own modules but its version."""
    code = "import pipeplan, sys; print([m for m in sys.modules if m.startswith(('pipeplan.', 'numpy', 'msgspec'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS)
    assert done.stdout.strip() == "['pipeplan.version']"


def test_plan_stays_the_function_when_the_file_of_that_name_is_imported():
    import pipeplan.plan
    from pipeplan.api.planning import plan

    assert pipeplan.plan.__wrapped__ is plan
    assert sys.modules["pipeplan.plan"].Plan.__module__ == "pipeplan.plan"
