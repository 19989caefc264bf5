"""Does what ``--json`` prints keep its fields? docs/reference/json-fields.json has a JSON Schema for each command.

``PYTHONPATH=.:tests python tests/cli/test_cli_json.py`` writes it anew. A field may come;
none goes or changes its type.
"""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cases.even_profile import PROFILE
from cases.files import written
from click.testing import CliRunner

from pipeplan.cli import COMMANDS, group

FIELDS = Path(__file__).parents[2] / "docs" / "reference" / "json-fields.json"
NAMED = (
    "options",
    "constants",
    "settings",
    "tflops",
    "rates",
)  # objects whose keys depend on what was asked, not on the format
MACHINE = "--gpus 2 --mem 1GB --bandwidth 12GB/s"
LINES = {  # in order: what is written is read by those below
    "plan": f"profile.json {MACHINE} --split 4,4 --weights flush --batch 16",
    "grid": f"profile.json {MACHINE} --batch 16 --microbatch 4",
    "estimate": "zoo:gpt-tiny --gpus 2 --gpu a100 --samples 1e6 --price 2",
    "check": "plan.json",
    "show": "plan.json",
    "simulate": "plan.json --schedule 1f1b --schedule gpipe --microbatches 4",
    "synthesize": "plan.json --microbatches 4 --moves 10",
    "export": "plan.json --to torch-csv",
    "import": "example:gpt2-small-b4-a100 train.sh --from megatron --gpus 2 --mem 8GB --effort quick",
    "compare": f"profile.json {MACHINE} --algorithms balance,gpipe",
    "calibrate": "estimated.json --gpu a100 --measured runs.csv",
    "diff": "profile.json profile.json",
    "run": "tiny.json --steps 2 --device cpu",
    "list": "",
    "doctor": "",
}
BEFORE = {
    "calibrate": "profile zoo:gpt-tiny,blocks=2 --microbatch 2 --estimate a100 -q -o estimated.json",
    "run": "plan example:gpt-tiny --gpus 2 --mem 1GB --algorithm balance --accumulate 2 -o tiny.json",
}
NEED_TORCH = ("estimate", *BEFORE)
SCRIPT = "--num-layers 12 --pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 16\n"


def output_of(command: str, folder: Path) -> Any:
    with chdir(folder):
        if command in BEFORE:
            called(BEFORE[command])
        said = called(f"{command} {LINES[command]} --json")
    if command == "plan":
        (folder / "plan.json").write_text(said)
    return json.loads(said)


def called(line: str) -> str:
    """What a command in this process prints."""
    done = CliRunner().invoke(group, line.split(), catch_exceptions=False)
    assert done.exit_code == 0, (line, done.stderr)
    return done.stdout


def files(folder: Path) -> None:
    written(folder, PROFILE, "profile.json")
    (folder / "runs.csv").write_text("ms,batch\n20,4\n50,16\n")
    (folder / "train.sh").write_text(SCRIPT)


def shape(value: Any) -> dict[str, Any]:
    """The JSON Schema of a value: objects have these keys at least."""
    if isinstance(value, dict):
        keys = [key for key in value if not key.isdigit()]  # others count stages or GPUs
        return {"type": "object", "properties": {key: {} if key in NAMED else shape(value[key]) for key in keys}}
    if isinstance(value, list):
        return {"type": "array"} | ({"items": common([shape(x) for x in value])} if value else {})
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
    return {"type": kinds[type(value)]}


def common(shapes: list[dict[str, Any]]) -> dict[str, Any]:
    """The schema of all items: what only some have may be missing."""
    found = shapes[0]
    if "properties" in found:
        names = [x for x in found["properties"] if all(x in each.get("properties", {}) for each in shapes)]
        every = {name: common([each["properties"][name] for each in shapes]) for name in names}
        return {"type": "object", "properties": every}
    return found if all(each == found for each in shapes) else {"type": found["type"]} if found else {}


def misfits(value: Any, said: dict[str, Any], place: str = "$") -> list[str]:
    """Where a value isn't as its schema says; what is null may be there another time, and the other way round."""
    kind = shape(value)["type"]
    if said.get("type") not in (None, "null", kind) and value is not None:
        return [f"{place} is {kind}, not {said['type']}"]
    found = []
    for key, each in said.get("properties", {}).items() if isinstance(value, dict) else ():
        found += misfits(value[key], each, f"{place}.{key}") if key in value else [f"{place}.{key} is gone"]
    for i, each in enumerate(value if isinstance(value, list) and "items" in said else ()):
        found += misfits(each, said["items"], f"{place}[{i}]")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("json")
    files(made)
    output_of("plan", made)
    return made


@pytest.mark.parametrize("command", LINES)
def test_fields_stay(command: str, folder: Path) -> None:
    if command in NEED_TORCH:
        pytest.importorskip("torch")
    assert misfits(output_of(command, folder), json.loads(FIELDS.read_text())[command]) == []


def test_every_command_with_json_is_there() -> None:
    with_json = {
        name
        for name in COMMANDS
        if any("--json" in x.opts for x in group.get_command(None, name).params)  # type: ignore[arg-type,union-attr]
    }
    assert set(LINES) == with_json == set(json.loads(FIELDS.read_text()))


def test_what_is_gone_or_another_is_said() -> None:
    said = shape({"a": [{"b": 1, "c": None}], "d": "x"})
    assert misfits({"a": [{"b": 1.5, "c": "x"}], "d": None, "e": 0}, said) == []
    assert misfits({"a": [{"b": "1"}]}, said) == ["$.a[0].b is string, not number", "$.a[0].c is gone", "$.d is gone"]


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        files(Path(name))
        told = {command: shape(output_of(command, Path(name))) for command in LINES}
    told["plan"] = told["grid"] = {**told["plan"], "description": "see pipeplan schema plan"}
    FIELDS.write_text(json.dumps(told, indent=1) + "\n")
