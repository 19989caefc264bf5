"""States in files: torch's, safetensors, several with an index; and what is said of those that don't fit."""

import json
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from oracles.host_memory import most_bytes
from torch import nn

from pipeplan.errors import BadInput
from pipeplan.runtime.exchange import collective
from pipeplan.runtime.model.build.loading import chain_model, load_weights
from pipeplan.runtime.model.build.state_file import SafetensorsWriter, read_state
from pipeplan.runtime.processes.agreement import _state_sum
from pipeplan.runtime.training.state.state import save_model

STATE = {
    "a": torch.arange(12.0).view(3, 4), "b": torch.arange(5).to(torch.bfloat16), "c": torch.tensor(7),
    "d": torch.tensor([True, False, True]), "e": torch.zeros(0, 3),
}  # fmt: skip


def written(path, state=STATE):
    with path.open("wb") as file:
        writer = SafetensorsWriter(file, {name: (x.shape, x.dtype) for name, x in state.items()})
        for name, x in reversed(state.items()):  # in whichever order they come
            writer.put([name], x)
    return path


def same(one, other):
    return one.keys() == other.keys() and all(
        x.dtype == other[k].dtype and torch.equal(x, other[k]) for k, x in one.items()
    )


def test_what_is_written_is_read(tmp_path):
    path = written(tmp_path / "x.safetensors")
    assert same(read_state(path), STATE)
    torch.save(STATE, tmp_path / "x.pt")
    assert same(read_state(tmp_path / "x.pt"), STATE)
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(read_state(tmp_path / "old.pt"), STATE)


def test_the_safetensors_library_agrees(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    assert same(library.load_file(written(tmp_path / "x.safetensors")), STATE)
    library.save_file(STATE, tmp_path / "y.safetensors")
    assert same(read_state(tmp_path / "y.safetensors"), STATE)


@pytest.mark.parametrize(("name", "most"), [("x.safetensors", 2), ("x.pt", 9)])
def test_of_a_trained_model_in_safetensors_rank_0_never_has_the_whole(name, most, tmp_path, monkeypatch):
    """Of eight others' tensors one comes while the last goes; torch's own files take all of them at once."""
    others = [(f"w{i}", (1000, 100), "float32") for i in range(8)]
    monkeypatch.setattr(collective, "gathered", lambda *_: [[], *([other] for other in others)])
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(dist, "recv", lambda tensor, other, group: tensor.fill_(other))
    model = SimpleNamespace(first_names={}, versions=None)
    held, _ = most_bytes(lambda: save_model(0, {}, model, tmp_path / name, None))
    assert most - 1 <= held / 400_000 <= most
    assert same(read_state(tmp_path / name), {f"w{i}": torch.full((1000, 100), i + 1.0) for i in range(8)})


def test_several_files_have_an_index(tmp_path):
    parts = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c", "d", "e"]}
    for file, names in parts.items():
        written(tmp_path / file, {name: STATE[name] for name in names})
    index = tmp_path / "model.safetensors.index.json"
    places = {name: file for file, names in parts.items() for name in names}
    index.write_text(json.dumps({"weight_map": places}))
    assert same(read_state(index), STATE)
    assert same(read_state(tmp_path), STATE)
    index.write_text(json.dumps({"weight_map": places | {"f": "model-1.safetensors"}}))
    with pytest.raises(BadInput, match=r"lists 'f' in model-1\.safetensors, which doesn't have it"):
        read_state(index)
    for odd in ("../x.safetensors", "..", ".", "", index.name):
        index.write_text(json.dumps({"weight_map": {"a": odd}}))
        with pytest.raises(BadInput, match=f"names '{odd}', which isn't a file of tensors|isn't a regular file"):
            read_state(index)
    index.write_text('{"weight_map": ["a"]}')
    with pytest.raises(BadInput, match=r"expected `object`, got `array` - at `\$\.weight_map`"):
        read_state(index)
    index.unlink()
    with pytest.raises(BadInput, match=r"has model-1\.safetensors, model-2\.safetensors; name the file"):
        read_state(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadInput, match=r"has neither \*.index.json nor \*.safetensors"):
        read_state(empty)


def with_header(header):
    return len(header).to_bytes(8, "little") + header + bytes(12)


def eight_bytes(start):
    return {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_was_zipped_again_is_read_right_or_refused(how, tmp_path):
    torch.save(STATE, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w", how) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    if how == zipfile.ZIP_STORED:
        assert same(read_state(tmp_path / "y.pt"), STATE)
    else:
        with pytest.raises(BadInput, match=r"y\.pt: has been compressed since torch\.save wrote it"):
            read_state(tmp_path / "y.pt")


def test_memory_beyond_an_entry_is_no_part_of_a_tensor(tmp_path):
    torch.save(STATE, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name)[: 4 if "/data/" in name else None])
    with pytest.raises(BadInput, match=r"y\.pt: has tensors that are larger than what the file holds of them"):
        read_state(tmp_path / "y.pt")


def test_what_is_no_state_is_said(tmp_path):
    torch.save([torch.ones(3)], tmp_path / "x.pt")
    with pytest.raises(BadInput, match=r"x\.pt: isn't a state_dict but a list"):
        read_state(tmp_path / "x.pt")
    with pytest.raises(BadInput, match="cannot be read: File name too long"):
        read_state(tmp_path / ("x" * 5000 + ".pt"))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_what_never_ends_is_not_opened(make, name, tmp_path):
    make(tmp_path / name)
    with pytest.raises(BadInput, match=r"x\.\w+: cannot be read: isn't a regular file"):
        read_state(tmp_path / name)
    assert _state_sum(tmp_path / name).startswith("unreadable")


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (None, "Unsupported global"),
        (b"cposix\nsystem\n(S'exit 3'\ntR.", "Trying to load unsupported GLOBAL posix.system"),
        (b"\x80\x02\x95.", "Unsupported operand 149"),
    ],
)
def test_nobody_is_told_how_to_switch_safety_off(pickled, said, tmp_path):
    torch.save({"a": Path("x")}, tmp_path / "x.pt")
    if pickled is not None:
        (tmp_path / "x.pt").write_bytes(pickled)
    with pytest.raises(BadInput, match=rf"x\.pt: cannot be loaded: UnpicklingError: {said}") as told:
        read_state(tmp_path / "x.pt")
    assert "weights_only" not in str(told.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1], "are said to be"),
        (lambda data: b"no header at all", "isn't a safetensors file, or not whole: a header of"),
        (lambda data: data[:8] + b"[" + data[9:], "isn't a safetensors file, or not whole"),
        (lambda data: data.replace(b"BF16", b"BX16"), "type 'BX16' is unknown"),
        (lambda data: data.replace(b"[3,4]", b"[9,4]"), "are said to be F32 \\[9, 4\\]"),
        (lambda data: data.replace(b"[3,4]", b'["3"]'), "isn't a safetensors file, or not whole: Expected `int`"),
        (lambda data: data.replace(b"[3,4]", b'"341"'), "isn't a safetensors file, or not whole: Expected `array`"),
        (lambda data: with_header(b'{"a":' + b"[" * 10**5), "nested too deeply"),
        (
            lambda data: with_header(json.dumps({"a": eight_bytes(0), "b": eight_bytes(4)}).encode()),
            "two tensors lie in the same bytes",
        ),
        (lambda data: b"", "a header of 0 bytes in 0"),
    ],
)
def test_damaged_files_are_refused(damage, words, tmp_path):
    path = written(tmp_path / "x.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match=words) as told:
        read_state(path)
    assert str(path) in str(told.value)


def model():
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers[1].weight = layers[0].weight
    return chain_model(layers, torch.zeros(1, 3), nn.functional.mse_loss, None), layers


def test_what_is_one_weight_may_be_there_once(tmp_path):
    loaded, layers = model()
    state = {"0.weight": torch.eye(3), "0.bias": torch.zeros(3), "1.bias": torch.ones(3)}
    load_weights(loaded, written(tmp_path / "x.safetensors", state))
    assert torch.equal(layers[1].weight, torch.eye(3))
    renamed = {"1.weight" if name == "0.weight" else name: x + 1 for name, x in state.items()}
    load_weights(loaded, written(tmp_path / "y.safetensors", renamed))
    assert torch.equal(layers[0].weight, torch.eye(3) + 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"1.bias": None}, "has no '1.bias', which the model has"),
        ({"2.bias": torch.zeros(1)}, "has '2.bias', which the model doesn't have"),
        ({"1.bias": torch.zeros(4)}, r"'1.bias' has shape \(4,\); the model's has shape \(3,\)"),
        ({"1.weight": torch.ones(3, 3)}, "'0.weight' and '1.weight' differ, and are one weight in the model"),
    ],
)
def test_a_state_of_another_model_is_refused_in_a_sentence(change, words, tmp_path):
    loaded, layers = model()
    state = {name: x for name, x in {**layers.state_dict(), **change}.items() if x is not None}
    with pytest.raises(BadInput, match=words):
        load_weights(loaded, written(tmp_path / "x.safetensors", state))
