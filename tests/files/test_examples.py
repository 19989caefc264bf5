"""Profiles that come with the program, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.errors import BadInput
from pipeplan.files.profiles import examples, located, read_profile

PROFILES = Path(__file__).parents[2] / "profiles"


def test_every_shipped_profile_has_a_name_and_reads():
    assert {f"{name}.json" for name in examples()} == {
        x.relative_to(PROFILES).as_posix() for x in PROFILES.rglob("*.json")
    }
    for name in examples():
        assert read_profile(f"example:{name}") == read_profile(str(PROFILES / f"{name}.json"))


def test_a_name_may_end_at_a_dash():
    assert located("example:resnet50") == located("example:resnet50-1000") == located("example:resnet50-1000-b8-v100")
    assert Path(located("example:published/resnet50")) != Path(located("example:resnet50"))
    assert located("resnet50") == "resnet50"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2-small", "is one of gpt2-small-b1-cpu, gpt2-small-b4-a100"),
        ("resnet", r"is not one of densenet121-1000-b8-v100, .*vgg16-224-b32-v100"),
        ("", "is not one of"),
        ("../profiles/gpt-tiny-b8-cpu", "is not one of"),
        ("*", "is not one of"),
        ("published", "is not one of"),
    ],
)
def test_other_names_are_bad_input_that_lists_them(name, words):
    with pytest.raises(BadInput, match=f"example:.*: {words}"):
        read_profile(f"example:{name}")


def test_commands_take_them(pipeplan, tmp_path):
    plan = tmp_path / "plan.json"
    tiny = ["example:gpt-tiny", "--gpus", "2", "--mem", "1GB", "--algorithm", "balance"]
    assert pipeplan("plan", *tiny, "-o", str(plan))[0] == 0
    code, _, err = pipeplan("diff", str(PROFILES / "gpt-tiny-b8-cpu.json"), "example:gpt-tiny", "--plan", str(plan))
    assert code == 0, err
    listed = json.loads(pipeplan("list", "profiles", "--json")[1])
    assert [row["name"] for row in listed] == [f"example:{name}" for name in examples()]
    assert "profiles:\n  example:densenet121-1000-b8-v100 " in pipeplan("list")[1]
