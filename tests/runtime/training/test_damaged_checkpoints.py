"""Checkpoints that are damaged: found before use, named, passed over."""

import os
import random
import shutil

import pytest

torch = pytest.importorskip("torch")

from cases.checkpoints import reworded
from cases.saved_runs import FILES, LAST, MODEL, OPTIONS, passed_over, plan
from cases.saved_runs import made as folder

from pipeplan.errors import BadInput
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import ABOUT, newest


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(name, folder):
    shutil.rmtree(folder / "step-00000002")
    path = folder / LAST / name
    whole = path.read_bytes()
    for bit in random.Random(name).sample(range(8 * len(whole)), 300):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=rf"no checkpoint is good: .*{LAST}/{name}: "):
            newest(folder)
    path.write_bytes(whole)
    assert newest(folder).position.step == 4


DAMAGE = {
    "cut": (lambda path: os.truncate(path, 100), "100 bytes, not|JSON is malformed|truncated"),
    "emptied": (lambda path: os.truncate(path, 0), "0 bytes, not|truncated"),
    "zeroed": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "its checksum is|malformed"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\n1"), "bytes, not|malformed"),
    "gone": (lambda path: path.unlink(), "no such file or directory"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "isn't a regular file"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "isn't a regular file"),
    "endless": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "isn't a regular file"),
    "elsewhere": (lambda path: path.symlink_to(path.rename(path.parents[2] / path.name)), "isn't a regular file"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_passed_over_and_named(damage, name, folder):
    do, words = DAMAGE[damage]
    do(folder / LAST / name)
    said = passed_over(folder)
    assert said.startswith(f"{name}: ")
    assert any(word in said for word in words.split("|")), said


def test_the_files_of_two_checkpoints_do_not_make_one(folder):
    shutil.copy(folder / "step-00000002" / FILES[1], folder / LAST / FILES[1])
    assert passed_over(folder).startswith("rank-00000.pt: ")


def test_a_checkpoint_elsewhere_is_none(folder, tmp_path):
    (folder / LAST).rename(tmp_path / LAST)
    (folder / LAST).symlink_to(tmp_path / LAST)
    assert passed_over(folder) == ": isn't a folder"


def test_other_files_are_nobodys_business(folder):
    (folder / LAST / "notes.txt").write_text("the good one")
    (folder / "step-00000005.old").mkdir()
    (folder / "step-best").symlink_to("step-00000002")
    (folder / "step-00000006").write_text("no folder")
    heard = []
    assert newest(folder, heard.append).position.step == 4
    assert heard == [f"{folder}/step-00000006: isn't a folder"]


def test_no_good_one_is_one_sentence(folder, plan):
    for step in (2, 4):
        (folder / f"step-{step:08d}" / FILES[2]).unlink()
    for step in (6, 8):
        (folder / f"step-{step:08d}").mkdir()
    with pytest.raises(BadInput, match=r"c: no checkpoint is good: .*8/run.json: .*6/run.json: .*4/rank.* and 1 more$"):
        run_plan(plan, MODEL, RunOptions(steps=9, checkpoint=folder, resume=True, **OPTIONS))
    assert newest(folder / "nowhere") is None


def nested(depth):
    return "[" * depth + "]" * depth


ODD = {  # what run.json could say, with a checksum that fits
    "files is a list": ({"files": ["rank-00000.pt"]}, "$.files"),
    "no files": ({"files": {}}, "files: has other names"),
    "a file is missing": ({"files": {FILES[2]: {"bytes": 0, "crc32": 0}}}, "files: has other names"),
    "a file above": ({"files": {"../step-00000002/rank-00000.pt": {"bytes": 0, "crc32": 0}}}, "files: has other names"),
    "a file elsewhere": ({"files": {"/etc/passwd": {"bytes": 0, "crc32": 0}}}, "files: has other names"),
    "a size is negative": ({"files": {FILES[1]: {"bytes": -1, "crc32": 0}}}, "$.files[...].bytes"),
    "a sum is huge": ({"files": {FILES[1]: {"bytes": 1, "crc32": 2**32}}}, "$.files[...].crc32"),
    "step is text": ({"position": {"step": "4", "microbatch": 8}}, "$.position.step"),
    "step is negative": ({"position": {"step": -4, "microbatch": 8}}, "$.position.step"),
    "step is huge": ({"position": {"step": 10**400, "microbatch": 8}}, "$.position.step"),
    "step is another": ({"position": {"step": 5, "microbatch": 8}}, "is of update 5"),
    "step is broken": ({"position": {"step": 4.5, "microbatch": 8}}, "$.position.step"),
    "step is not a number": ({"position": {"step": float("nan"), "microbatch": 8}}, "JSON is malformed"),
    "microbatch is true": ({"position": {"step": 4, "microbatch": True}}, "$.position.microbatch"),
    "microbatch is missing": ({"position": {"step": 4}}, "$.position"),
    "microbatch is huge": ({"position": {"step": 4, "microbatch": 10**16}}, "$.position.microbatch"),
    "position is null": ({"position": None}, "$.position"),
    "model is a number": ({"model": 4}, "$.model"),
    "seed is an object": ({"seed": {}}, "$.seed"),
    "seed is endless": ({"seed": 10**4000}, "seed: has 13288 bits"),
    "more keys": ({"code": "import os"}, "unknown field `code`"),
    "of the version before": (
        {"format": "pipeplan-checkpoint/1"},
        "is of format 'pipeplan-checkpoint/1'; this version",
    ),
    "of no format": ({"format": 1}, "$.format"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_list_of_files_is_damage(case, folder):
    changes, words = ODD[case]
    reworded(folder / LAST, **changes)
    said = passed_over(folder)
    assert said.startswith(f"{ABOUT}: ")
    assert words in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"), (b"[]", "expected `object`, got `array`"), (b"null", "expected `object`, got `null`"),
        (b'{"format": "\xff\xfe"}', "not UTF-8"), (b"\x80\x04\x95", "not UTF-8"),
        (nested(10**6).encode(), "expected `object`, got `array`"),
        (f'{{"a": {nested(10**6)}, "format": ""}}'.encode(), "nested too deeply"),
        (f'{{"format": "pipeplan-checkpoint/2", "files": {nested(10**6)}}}'.encode(), "nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_files_is_damage(content, words, folder):
    (folder / LAST / ABOUT).write_bytes(content)
    said = passed_over(folder)
    assert said.startswith(f"{ABOUT}: ")
    assert words in said


def test_a_list_of_files_of_any_size_is_not_read(folder):
    os.truncate(folder / LAST / ABOUT, 10**8)
    assert passed_over(folder) == f"{ABOUT}: has 0.10 GB; it is never larger than 16.78 MB"
