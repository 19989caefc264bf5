"""The layer law: a module imports only from rows above it, and each outside library has its place."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pipeplan"

# Each module's row, by the longest name that it starts with; what isn't named here assembles the others, in row 6.
# Decimals order modules of one row: problem -> costs, plan; program -> simulate -> timelines -> evaluate -> validate.
ROWS = {
    "errors": 1.0, "search": 1.0, "groups": 1.0, "storages": 1.0, "units": 1.1,
    "problem": 2.0, "costs": 2.1, "plan": 2.1, "granularity": 2.1,
    "stages": 3.0,
    "bounds": 4.0, "program": 4.0, "nf1b": 4.1, "message_driven": 4.1, "weight_versions": 4.1, "simulate": 4.2,
    "jitter": 4.3, "timelines": 4.3, "evaluate": 4.4, "deadlock": 4.4, "validate": 4.5,
    "partition": 5.0, "schedule": 5.0,
    "": 6.0, "report": 6.5,
    "zoo": 7.0, "runtime": 7.1,
    "cli": 8.0, "__main__": 9.0,
}  # fmt: skip
PACKAGES = {"partition", "schedule", "report", "runtime", "zoo", "cli", ""}  # modules of one of these know each other

# Whose rows reach less far than "everything above".
NEVER = {
    "partition": [
        "stages",
        "validate",
        "bounds",
        "program",
        "nf1b",
        "message_driven",
        "simulate",
        "timelines",
        "evaluate",
        "schedule",
    ],
    "schedule": ["validate", "bounds", "timelines", "evaluate", "partition"],
    "validate": ["schedule"],
    "runtime": ["partition", "schedule", "planner", "report"],
    "zoo": ["partition", "schedule", "stages", "planner", "report", "runtime"],
}

OUTSIDE = {
    "pulp": ["schedule.ilp"],
    "networkx": ["profiles", "program", "partition.pipedream_released"],
    "torch": ["runtime", "zoo"],
    "click": ["cli"],
    "rich": ["report"],
    "matplotlib": ["report"],
    "numba": [],
    "msgspec": ["schemas", "files", "accelerators", "report", "runtime", "cli"],
}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def inside(module, name):
    return name == "" or module == name or module.startswith(f"{name}.")


def home(module):
    """The longest name in ROWS that ``module`` is or lies in."""
    return max((name for name in ROWS if inside(module, name)), key=len)


@cache
def imports(module):
    """What a module imports anywhere but for annotations: pipeplan's modules by name, others with a leading '!'."""
    path = MODULES[module]
    package = path.relative_to(PACKAGE).parts[:-1]
    tree = ast.parse(path.read_text())
    unused = {n for test in ast.walk(tree) if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
              for n in ast.walk(test)}  # fmt: skip
    found = set()
    for node in ast.walk(tree):
        if node in unused:
            continue
        if isinstance(node, ast.Import):
            found |= {f"!{alias.name.split('.')[0]}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(f"!{node.module.split('.')[0]}")
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            name = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{name}.{alias.name}".removeprefix(".")
                if inner in MODULES or name in MODULES:
                    found.add(inner if inner in MODULES else name)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_from_rows_above(module):
    own = home(module)
    for name in imports(module):
        if name.startswith("!"):
            assert name != "!pipeplan", f"{module} imports pipeplan by its full name; write a relative import"
            continue
        other = home(name)
        above = ROWS[other] < ROWS[own] or (other == own and own in PACKAGES)
        assert above, f"{module} (row {ROWS[own]}) imports {name} (row {ROWS[other]})"
        assert not any(inside(name, far) for far in NEVER.get(own, ())), f"{module} must not know {name}"


@pytest.mark.parametrize("library", OUTSIDE)
def test_outside_libraries_have_their_place(library):
    for module in MODULES:
        if f"!{library}" in imports(module):
            assert any(inside(module, place) for place in OUTSIDE[library]), f"{module} imports {library}"


def test_the_law_sees_every_module():
    assert len(MODULES) > 40
    assert {"errors", "schedule.ilp", "cli.plan", "partition"} <= set(MODULES)
    assert "problem" in imports("costs")
    assert "!numpy" in imports("costs")
    assert "partition.contiguous" in imports("partition")
    assert imports("__main__") == {"cli"}
    assert home("partition.balance") == "partition"
    assert home("planner") == ""
    assert not [name for name in ROWS if name and name not in MODULES]


def test_no_two_modules_import_each_other_at_the_top():
    """Inside a package the law allows any direction, but not circles."""
    known = {module: {name for name in imports(module) if name in MODULES and name != module} for module in MODULES}
    left = dict(known)
    while left:
        free = [module for module, needs in left.items() if not needs & set(left)]
        assert free, f"these import each other in a circle: {sorted(left)}"
        for module in free:
            del left[module]


def test_help_is_instant():
    """Importing the command line loads none of the heavy libraries, not even numpy."""
    heavy = ["numpy", "rich", "torch", "pulp", "networkx", "msgspec", "matplotlib"]
    code = f"import pipeplan.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
