"""The law of the house: which room may import which, in one ordered list, and where outside libraries may be used."""

import ast
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args

import networkx as nx
import pytest
from cases.patience import SECONDS

from pipeplan.choices import DRAINED, Weights
from pipeplan.registry import Late

PACKAGE = Path(__file__).parents[1] / "pipeplan"
NOUNS = "registry choices version errors integers names units deadline status scratch problem plan"
MODELS = "runtime.model runtime.data runtime.model.build"
RUNTIME = f"runtime.device runtime.lowering runtime.measure {MODELS} runtime.exchange runtime.training"
TORCH_FREE = [
    "runtime.lowering",
    *(f"runtime.measure.{name}" for name in ("report", "calibrate", "times", "trace_file")),
]

# A room, and the rooms above it in this list that it may import. A module lies in the longest room that names it.
LAW = {
    "registry": "",
    "choices": "",
    "version": "",
    "errors": "",
    "integers": "",
    "names": "",
    "units": "errors names",
    "deadline": "errors",
    "status": "",
    "scratch": "",
    "problem": "choices integers deadline",
    "plan": "choices problem",
    "zoo": "errors",
    "cost": NOUNS,
    "schedule": f"{NOUNS} cost",
    "schedule.periodic": f"{NOUNS} cost schedule",
    "schedule.synthesis": f"{NOUNS} cost schedule schedule.periodic",
    "partition": f"{NOUNS} cost",
    "check": f"{NOUNS} cost schedule partition",
    "planner": f"{NOUNS} cost schedule schedule.periodic schedule.synthesis partition check",
    "files": f"{NOUNS} cost schedule check",
    "runtime.processes.own_processes": "scratch",
    "runtime.surroundings": "",
    "runtime.device": f"{NOUNS} runtime.surroundings",
    "runtime.lowering": f"{NOUNS} cost schedule check",
    "runtime.measure": f"{NOUNS} cost schedule check files runtime.device runtime.lowering",
    "runtime.model": f"{NOUNS} zoo schedule runtime.device",
    "runtime.data": f"{NOUNS} runtime.processes.own_processes runtime.model",
    "runtime.model.build": f"{NOUNS} files zoo runtime.device runtime.model runtime.data",
    "runtime.exchange": f"{NOUNS} runtime.device runtime.lowering runtime.model",
    "runtime.profiler": f"{NOUNS} cost files runtime.processes.own_processes runtime.device runtime.exchange {MODELS}",
    "runtime.training": f"{NOUNS} schedule files {RUNTIME.removesuffix(' runtime.training')}",
    "runtime": f"{NOUNS} runtime.measure",
    "runtime.engine": f"{NOUNS} cost schedule schedule.periodic check files runtime.processes.own_processes {RUNTIME}",
    "runtime.processes": f"{NOUNS} files runtime.processes.own_processes runtime.engine {RUNTIME}",
    "report": f"{NOUNS} cost schedule schedule.synthesis check partition planner files runtime.lowering "
    "runtime.measure runtime.profiler",
    "api": f"{NOUNS} zoo cost schedule schedule.periodic schedule.synthesis check partition planner files runtime "
    f"runtime.surroundings runtime.processes runtime.engine runtime.profiler {RUNTIME} report",
    "cli": "*",
    "__main__": "errors cli",
}

OUTSIDE = {
    "pulp": "schedule.periodic.ilp schedule.periodic.solvers schedule.synthesis.time_indexed",
    "networkx": "problem schedule files partition",
    "torch": "runtime zoo",
    "click": "cli",
    "rich": "report",
    "matplotlib": "report",
    "numba": "",
    "msgspec": "files runtime.exchange.collective runtime.measure.trace_file runtime.model.build.state_file "
    "runtime.training.state.checkpoint",
}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def inside(module, room):
    return module == room or module.startswith(f"{room}.")


def room_of(module):
    return max((room for room in LAW if inside(module, room)), key=len)


@cache
def import_nodes(module):
    """A module's imports, and whether each is there for annotations alone."""
    nodes = list(ast.walk(ast.parse(MODULES[module].read_text())))
    tests = [x for x in nodes if isinstance(x, ast.If) and "TYPE_CHECKING" in ast.unparse(x.test)]
    unused = {x for test in tests for x in ast.walk(test)}
    return [(x, x in unused) for x in nodes if isinstance(x, ast.Import | ast.ImportFrom)]


@cache
def imports(module, annotations=False):
    """What a module imports anywhere, on request for ``annotations`` too: pipeplan's modules by name, others with a
    leading '!'."""
    package = MODULES[module].relative_to(PACKAGE).parts[:-1]
    found = set()
    for node, unused in import_nodes(module):
        if unused and not annotations:
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


@cache
def late(module):
    """What the rows of a module's tables name, to be imported when it is asked for."""
    own = import_module(f"pipeplan.{module}") if "Late(" in MODULES[module].read_text() else None
    return {x.path for x in inside_values(vars(own))} if own else set()


def inside_values(value, depth=5):
    """Every Late in a table, or in the rows of one."""
    if isinstance(value, Late):
        yield value
    elif depth:
        rows = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if is_dataclass(value) and not isinstance(value, type):
            rows = [getattr(value, x.name) for x in fields(value)]
        for row in rows:
            yield from inside_values(row, depth - 1)


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_from_the_rooms_that_the_law_names(module):
    own = room_of(module)
    for name in imports(module, annotations=True) | {path.split(":")[0] for path in late(module)}:
        if name.startswith("!"):
            assert name != "!pipeplan", f"{module} imports pipeplan by its full name; write a relative import"
            places = OUTSIDE.get(name[1:])
            allowed = places is None or any(inside(module, place) for place in places.split())
            assert allowed, f"{module} imports {name[1:]}, whose place is {places}"
        elif room_of(name) != own and LAW[own] != "*":
            assert room_of(name) in LAW[own].split(), f"{module} (room {own}) imports {name} (room {room_of(name)})"


OUTER = (  # what a plan may need, but not every plan: reached by the rows of tables alone
    "schedule.synthesis check.bounds.drained partition.madpipe partition.pipedream partition.piper partition.moves "
    "planner.grids planner.what_if planner.layer_orders planner.claims planner.periodic.walks planner.periodic.special"
)
ORDERED = "schedule.programs schedule.written planner.simulated"  # what a plan may need that isn't a pattern
DRAINED_ALONE = "planner.drained check.shapes"


@pytest.mark.parametrize(
    ("core", "outer"),
    [
        ("planner.plan", f"{OUTER} {ORDERED} {DRAINED_ALONE}"),
        ("check.validate", f"{OUTER} {ORDERED} {DRAINED_ALONE}"),
        ("api.planning", f"{OUTER} {DRAINED_ALONE}"),
        ("planner.drained.plan", OUTER),
        ("planner.simulated.simulation", f"{OUTER} {DRAINED_ALONE}"),
    ],
)
def test_the_core_reaches_outer_folders_by_rows_alone(core, outer):
    found = [name for name in reached_from(core) if any(inside(name, room) for room in outer.split())]
    assert found == [], f"{core} imports {', '.join(found)}"


def test_what_rows_name_is_there():
    for module in MODULES:
        for path in late(module):
            name, own = path.split(":")
            assert callable(getattr(import_module(f"pipeplan.{name}"), own)), path


def test_nobody_compares_the_names_of_weights_policies():
    """What follows from a policy is in its row; the name of one that drains is also that of a kind of schedule."""
    for module, path in MODULES.items():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(f'"{name}"' in text for name in get_args(Weights)) else ():
            if isinstance(node, ast.Compare | ast.match_case):
                named = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)} & set(get_args(Weights))
                allowed = {DRAINED} if "weights" not in ast.unparse(node) else set()
                assert named <= allowed, f"{module}: {ast.unparse(node)}"


def test_ranks_exchange_nothing_that_is_unpickled():
    """gloo and NCCL ask nobody who he is, and torch's collectives of objects unpickle what comes."""
    for module, path in MODULES.items():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "_object" in text else ():
            assert not isinstance(node, ast.Attribute) or not re.search("_object(_list)?$", node.attr), module


@pytest.mark.parametrize("module", [m for m in MODULES if any(inside(m, room) for room in TORCH_FREE)])
def test_what_is_lowered_and_measured_can_be_read_without_torch(module):
    assert "!torch" not in imports(module)


def test_the_law_is_one_ordered_list():
    """Every room names only rooms before it, so no import leads upwards; every room exists and every module has one."""
    above = []
    for room, allowed in LAW.items():
        assert room in MODULES
        assert allowed == "*" or set(allowed.split()) <= set(above), f"{room} may import a room below it"
        above.append(room)
    assert all(room_of(module) for module in MODULES)


def test_the_law_sees_every_module():
    assert len(MODULES) > 100
    assert "integers" in imports("problem.chain")
    assert "!numpy" in imports("problem.chain")
    assert "partition.contiguous.contiguous" in imports("planner.periodic.portfolio")
    assert imports("__main__") == {"!__future__", "!atexit", "!os", "!signal", "!sys", "cli", "errors"}
    assert room_of("runtime.training.stage") == "runtime.training"
    assert room_of("runtime.processes.launch") == "runtime.processes"


def test_no_two_modules_import_each_other():
    """Inside a room the law allows any direction, but not circles, for annotations neither."""
    below = {module: imports(module, annotations=True) & MODULES.keys() - {module} for module in MODULES}
    assert list(nx.simple_cycles(nx.DiGraph(below))) == []


OUTER_OF_RUNS = (  # what a run may need, but not every run: reached by rows alone
    "runtime.model.trace.traced runtime.model.trace.trace runtime.model.trace.compared runtime.exchange.nearby "
    "runtime.exchange.threaded runtime.engine.held_out runtime.engine.comparison runtime.model.build.hugging_face "
    "runtime.model.build.tensor_plan runtime.engine.arrival_order runtime.training.state runtime.measure.report"
)


def reached_from(module):
    """What a module imports, however far, itself among it."""
    below = nx.DiGraph((one, name) for one in MODULES for name in imports(one))
    return {module, *nx.descendants(below, module)}


def test_a_run_reaches_what_few_need_by_rows_alone():
    reached = reached_from("runtime.engine.phases")
    assert [name for name in reached if any(inside(name, room) for room in OUTER_OF_RUNS.split())] == []


@pytest.mark.parametrize(
    ("module", "most"),
    [
        ("planner.plan", 14_000),
        ("planner.drained.plan", 17_000),
        ("runtime.engine.phases", 19_000),
        ("check.validate", 6_000),
    ],
)
def test_what_must_be_read_to_follow_one_thing_is_limited(module, most):
    reached = reached_from(module) & MODULES.keys()
    assert sum(len(MODULES[name].read_text().splitlines()) for name in reached) < most


def folder_of(module, inside):
    """The folder, or the file, of a package's own that a module is in."""
    return module.removeprefix(f"{inside}.").split(".")[0]


@pytest.mark.parametrize("package", ["partition"])
def test_no_two_folders_import_each_other(package):
    own = [module for module in MODULES if module.startswith(f"{package}.")]
    arrows = {(folder_of(module, package), folder_of(name, package)) for module in own for name in imports(module)
              if name.startswith(f"{package}.")}  # fmt: skip
    assert list(nx.simple_cycles(nx.DiGraph((one, other) for one, other in arrows if one != other))) == []


@pytest.mark.parametrize("package", ["partition", "check", "planner"])
def test_what_a_package_hands_on_hides_none_of_its_modules(package):
    """Else ``import pipeplan.a.b as c`` gives a function for the module b, or fails."""
    tree = ast.parse(MODULES[package].read_text())
    own = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == package}
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    assert not own & {alias.asname or alias.name for node in nodes for alias in node.names}


def test_help_is_instant():
    """Importing the command line loads none of the heavy libraries, not even numpy."""
    heavy = ["numpy", "rich", "torch", "pulp", "networkx", "msgspec", "matplotlib"]
    code = f"import pipeplan.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS)
    assert done.stdout.strip() == "[]"
