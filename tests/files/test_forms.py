"""What every JSON file has in common, whatever its form."""

import pytest

from pipeplan.errors import BadInput
from pipeplan.files.forms import refuse_repeated_keys
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.files.machines.platforms import read_platform
from pipeplan.files.profiles import read_profile

PLATFORM = '{"memory": "16GB", "levels": [{"count": 2, "bandwidth": "1GB/s", "bandwidth": "2GB/s"}]}'
GPU = """{"name": "X", "memory": "1GB", "bandwidth": "1GB/s", "tflops": {"float32": 1, "float32": 2},
          "launch": "5us"}"""
PROFILE = r"""{"format": "pipeplan-profile/1", "name": "x", "microbatch": 1, "dtype": "float32", "device": "",
"source": "", "input_bytes": 0, "layers": [{"name": "a", "forward_ns": 1, "backward_ns": 1, "weight_bytes": 0,
"output_bytes": 0, "saved_bytes": 0, "forward_\u006es": 2}]}"""


@pytest.mark.parametrize(
    ("read", "text", "place"),
    [
        (read_platform, PLATFORM, "$.levels[0].bandwidth"),
        (accelerator, GPU, "$.tflops.float32"),
        (read_profile, PROFILE, "$.layers[0].forward_ns"),
    ],
)
def test_what_is_said_twice_is_refused_with_its_place(read, text, place, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read(str(path))
    assert str(caught.value) == f"{path}: {place} is there twice"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1, "a": 1}', "$.a"),
        ('{"a": [{"b": {"c": 1, "c": 2}}]}', "$.a[0].b.c"),
        ('[[], {"x": {}, "y": {}, "x": {}}]', "$[1].x"),
        ('{"a": {"b": 1, "b": 2}, "c": 1, "c": 2}', "$.c"),
        ('{"": 1, "": 2}', "$."),
    ],
)
def test_the_place_is_that_of_the_repeated_key(text, place):
    with pytest.raises(BadInput, match="is there twice") as caught:
        refuse_repeated_keys(text, "f")
    assert str(caught.value) == f"f: {place} is there twice"


def test_what_is_said_once_in_each_object_may_be_said_in_others():
    refuse_repeated_keys('[{"a": 1}, {"a": {"a": 1}}, "a", ' + "9" * 5000 + "]", "f")
