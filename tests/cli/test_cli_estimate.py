"""``pipeplan estimate``: whether a model fits on named GPUs, how long it trains, and a sentence for bad input."""

from __future__ import annotations

import json

import pytest
from conftest import Command

pytest.importorskip("torch")

TINY = ("estimate", "zoo:gpt-tiny,blocks=2", "--gpus", "2")


def test_it_says_what_fits_and_how_long_training_takes(pipeplan: Command) -> None:
    arguments = (*TINY, "--gpu", "v100", "--batch", "32", "--samples", "1e9")
    code, out, err = pipeplan(*arguments)
    assert (code, err) == (0, "")
    assert "microbatches of 1 in float16" in out  # which that GPU has no other half than
    assert "parameters  0.000e9" in out
    assert "days for 1,000,000,000 samples, 31,250,000 batches" in out
    code, out, _ = pipeplan(*arguments, "--json")
    found = json.loads(out)
    assert found["days"] == pytest.approx(1e9 / found["samples_per_second"] / 86400)
    assert found["batch_seconds"] == pytest.approx(32 / found["samples_per_second"])
    low, high = (x / found["batch_seconds"] for x in found["batch_seconds_within"])
    assert 0.3 < low < 1 < high < 10, "a host that takes 9 to 65 us an operation"
    assert all(stage["peak_bytes"] <= stage["memory_bytes"] for stage in found["stages"])


def test_an_update_has_four_microbatches_a_gpu(pipeplan: Command) -> None:
    code, out, _ = pipeplan(*TINY, "--gpu", "a100", "--microbatch", "2", "--data-parallel", "1", "--json")
    found = json.loads(out)
    assert (code, found["batch"], found["pipelines"], found["days"]) == (0, 16, 1, None)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--gpu", "a100", "--mem", "1MB"), 1, "no grid fits"),
        ((), 2, "name its GPU with --gpu"),
        (("--gpu", "a100", "--samples", "many"), 2, "--samples: 'many' is not a positive whole number"),
        (("--gpu", "a100", "--samples", "1e999999999"), 2, "--samples: '1e999999999' is not a positive whole number"),
        (("--gpu", "a100", "--data-parallel", "few"), 2, "'few' is not a valid auto|N"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(
    arguments: tuple[str, ...], code: int, sentence: str, pipeplan: Command
) -> None:
    found, out, err = pipeplan(*TINY, *arguments)
    assert (found, out) == (code, "")
    assert sentence in err
    assert "Traceback" not in err
