"""The checks of machines with GPUs, as far as they can be tried without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cases.forked import forked

CHECKS = Path(__file__).parents[2] / "scripts" / "checks" / "cuda"


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(CHECKS))
    import results

    return results


def test_the_probe_needs_the_standard_library_alone_and_says_what_to_carry(tmp_path):
    file = tmp_path / "probe.json"
    command = [sys.executable, "-I", "-S", CHECKS / "probe.py", "--results", file]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    found = json.loads(done.stdout)
    assert found == json.loads(file.read_text())
    assert {"torch", "msgspec"} <= {*found["packages"]["carry"]}
    assert found["sharing"] == {"descriptors_travel": True, "abstract_sockets": True}


def test_answers_of_before_count_on_the_same_machine_alone(results, tmp_path):
    one = results.Results(tmp_path / "one.json", "1 x H200")
    one.put("memory", "good", "it fits")
    one.put("fault", "failed", "it hangs")
    same, other = (results.Results(tmp_path / f"{name}.json", name) for name in ("1 x H200", "2 x H200"))
    for found in (same, other):
        found.take_over(one.file)
    assert [same.has_good("memory"), same.has_good("fault"), other.has_good("memory")] == [True, False, False]
    assert same.parts["fault"]["sentence"] == "it hangs"
    assert not other.parts


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["good", "open"], 0),
        (["good", "failed", "left out"], 1),
        (["good", "left out"], 3),
        (["good", "not reached"], 3),
    ],
)
def test_what_was_left_out_is_not_good(results, tmp_path, states, code):
    found = results.Results(tmp_path / "results.json", "here")
    for i, state in enumerate(states):
        found.put(str(i), state, "")
    assert found.exit_code(map(str, range(len(states)))) == code
    assert json.loads(found.file.read_text())["summary"] == {state: states.count(state) for state in states}


def test_time_that_is_over_leaves_the_rest_unreached_and_says_so(results, tmp_path):
    before = results.Results(tmp_path / "results.json", results.label("cpu", 0))
    before.put("randomness", "good", "as it was")
    parts = ("--part", "randomness", "--part", "exits")
    done = forked(CHECKS, tmp_path, "--device", "cpu", *parts, "--seconds", 0)
    parts = json.loads(before.file.read_text())["parts"]
    assert done.returncode == 3, done.stderr
    assert {name: part["state"] for name, part in parts.items()} == {"randomness": "good", "exits": "not reached"}


def test_streams_that_block_train_what_the_host_would(tmp_path):
    """Over a stand-in for NCCL whose streams are threads here."""
    done = forked(CHECKS, tmp_path, "--device", "cpu", "--part", "streams_straight", "--part", "streams_replicas")
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert done.returncode == 0, [part["trace"] or part["sentence"] for part in parts.values()]
    assert set(parts) == {"streams_straight", "streams_replicas"}
    assert all(part["sentence"].startswith("the same as through the host but for ") for part in parts.values())
    assert not list(tmp_path.glob("*/mailbox"))
