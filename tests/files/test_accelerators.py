from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.cost.roofline import Constants
from pipeplan.errors import BadInput
from pipeplan.files.machines import accelerators as accelerators_file
from pipeplan.files.machines.accelerators import accelerator, accelerators, with_constants


def test_the_table_has_the_usual_gpus_and_plausible_figures() -> None:
    table = accelerators()
    assert {"a100", "h100", "h200", "v100", "rtx4090", "l40s", "t4"} <= set(table)
    for name, entry in table.items():
        assert 8e9 <= entry.memory_bytes <= 3e11, name
        assert 2e11 <= entry.bandwidth_bytes <= 1e13, name
        assert entry.launch_ns == 5000 or (entry.measured != "none" and 1000 <= entry.launch_ns <= 10_000)
        assert (entry.measured == "none") == (not entry.source), name
        assert 5e12 <= entry.peak("float32") <= entry.peak(entry.number("float32", "convolution")) <= 2e15
        if "bfloat16" in entry.tflops:
            assert entry.peak("bfloat16") == entry.peak("float16") >= entry.peak("float32")


def test_every_entry_says_whether_it_was_measured_and_measured_ones_which_script_has_the_rows() -> None:
    table = json.loads(Path(accelerators_file.__file__).with_name("accelerators.json").read_text())
    assert all("measured" in entry for entry in table.values())
    for entry in table.values():
        if entry["measured"] in ("table", "runs"):
            place = entry["source"].partition("(")[2].partition(")")[0].split()[0]
            assert place.startswith("scripts/checks/")
            assert (Path(__file__).parents[2] / place).exists()


def test_what_nothing_measured_has_checked_says_so() -> None:
    for name, like in (("rtx4090", "an A100's"), ("h100", "an H200's kernels")):
        assert f"reach what {like}" in accelerator(name).doubt.replace("the shares that", "what")
        assert "nothing measured on this GPU has checked that" in accelerator(name).doubt
    assert accelerator("b200").doubt.startswith("kernels reach what fits 514 products that SimuMax's authors timed")


def test_published_figures() -> None:
    a100, v100 = accelerator("A100"), accelerator("v100")
    assert (a100.peak("float32"), a100.peak(a100.number("float32", "convolution")), a100.peak("bfloat16")) == (
        19.5e12, 156e12, 312e12,
    )  # fmt: skip
    assert (a100.memory_bytes, a100.bandwidth_bytes) == (80 * 10**9, 2039 * 10**9)
    assert v100.peak(v100.number("float32", "convolution")) == v100.peak("float32") == 15.7e12
    with pytest.raises(BadInput, match=r"V100 .* no peak is known for bfloat16, only for float64, float32, float16"):
        v100.peak("bfloat16")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(BadInput, match=r"no accelerator is named 'z100'; known are a10, a100.* or FILE.json"):
        accelerator("z100")


def test_a_file_describes_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"name": "mine", "memory": "8GiB", "bandwidth": "50GB/s", "tflops": {"float32": 1.5}, "launch": "2us"}'
    )
    mine = accelerator(str(path))
    assert (mine.memory_bytes, mine.bandwidth_bytes, mine.launch_ns) == (8 * 2**30, 50 * 10**9, 2000)
    assert mine.peak(mine.number("float32", "convolution")) == 1.5e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "input data was truncated"),
        ('{"name": "x", "memory": "8", "bandwidth": "50GB/s", "tflops": {"float32": 1}}', "memory: '8' has no unit"),
        ('{"name": "x", "memory": "8GB", "bandwidth": "5", "tflops": {"float32": 1}}', "bandwidth: '5' has no unit"),
        ('{"name": "x", "memory": "8GB", "bandwidth": "5GB/s", "tflops": {}}', "tflops must have positive peaks"),
        ('{"name": "x", "memory": "8GB", "bandwidth": "5GB/s", "tflops": {"a": 0}}', "tflops must have positive"),
        ('{"name": "x"}', "missing required field"),
        (
            '{"name": "x", "memory": "8GB", "bandwidth": "5GB/s", "tflops": {"float32": 1}, "rates": {"relu": 1}}',
            "rates: no kind of kernel is named 'relu'; known are product, product-unaligned",
        ),
        (
            '{"name": "x", "memory": "8GB", "bandwidth": "5GB/s", "tflops": {"float32": 1}, "rates": {"norm half": 0}}',
            "rates must be above 0",
        ),
        (
            '{"name": "x", "memory": "8GB", "bandwidth": "5GB/s", "tflops": {"float32": 1}, "rates": "z100"}',
            "rates: no accelerator is named 'z100'",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        accelerator(str(path))
    with pytest.raises(BadInput, match="cannot be read"):
        accelerator(str(tmp_path / "none.json"))


def test_rates_are_those_of_the_type_or_of_the_kind_without_its_pass() -> None:
    h200, h100, v100, a100 = map(accelerator, ("h200", "h100", "v100", "a100"))
    assert (
        h200.rate("batch-norm", "bfloat16") == h200.rate("batch-norm", "float16") < h200.rate("batch-norm", "float32")
    )
    assert h200.rate("convolution-3x3", "float16", last=True) > h200.rate("convolution-3x3", "float16")
    assert h100.rate("norm", "float32") == h200.rate("norm", "float32") != a100.rate("norm", "float32") == (1, 1)
    assert v100.rate("convolution-3x3", "float32") == (2.1, 2.1)
    assert a100.rate("convolution-3x3", "tf32") == h200.rate("convolution-3x3", "tf32"), "on tensor cores"
    assert a100.rate("convolution-depthwise", "float32") == v100.rate("convolution-depthwise", "float32")
    assert [x.number("float32", "convolution") for x in (v100, a100)] == ["float32", "tf32"]
    assert a100.number("float16", "pooling") == "float32"
    assert a100.rate("attention-backward", "float16") == a100.rate("attention", "float16") == (0.4, 0.4)
    assert h200.rate("softmax", "float64") == (1, 1)


def test_host_times_are_said_or_those_of_what_issues_operations() -> None:
    a100 = accelerator("a100")
    said = {text: (x.forward_host_ns, x.backward_host_ns) for text in ("20us", "60us,35us", "compiled", "graphs", "0")
            for x in [a100.constants(text)]}  # fmt: skip
    assert said == {
        "20us": (20_000, 20_000), "60us,35us": (60_000, 35_000), "compiled": (3000, 3000), "graphs": (0, 0),
        "0": (0, 0),
    }  # fmt: skip
    assert a100.constants("eager") == a100.constants()
    for wrong, message in (
        ("fast", "none of eager, compiled, graphs, megatron"),
        ("1us,2us,3us", "isn't a time"),
        ("20", "no unit"),
    ):
        with pytest.raises(BadInput, match=f"--engine: '{wrong}'.*{message}"):
            a100.constants(wrong)
    own = with_constants(a100, Constants(0.5, 0.6, 4000, 61_000, 32_000), "fitted")
    assert own.constants() == Constants(0.5, 0.6, 4000, 61_000, 32_000)
    assert own.constants("graphs").forward_host_ns == 0
    assert own.measured == a100.measured
    assert (a100.number("float8_e4m3fn", "matmul"), a100.number("bfloat16", "matmul")) == ("float8", "bfloat16")
    runs = with_constants(a100, Constants(0.5, 0.6, 4000, 61_000, 32_000), "fitted", (0.9, 1.1))
    assert (runs.measured, runs.within) == ("runs", (0.9, 1.1))
