"""GPUs by name and number: levels, memory and links, and what is said to be assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases.files import CHAIN

from pipeplan.errors import BadInput
from pipeplan.files.machines.accelerators import accelerators
from pipeplan.files.machines.platforms import platform_of_gpus
from pipeplan.units import gpu_counts

A100 = replace(CHAIN, device="NVIDIA A100 SXM 80GB (estimated)")


@pytest.mark.parametrize(("text", "counts"), [("8", (8,)), ("2x8", (8, 2)), ("1x4", (4, 1))])
def test_counts(text, counts):
    assert gpu_counts(text) == counts


@pytest.mark.parametrize("text", ["0", "2x", "x2", "2x8x2", "-1", "5000", "64x65", "0x8", "two"])
def test_what_is_no_count(text):
    with pytest.raises(BadInput, match="isn't a GPU count: write 8, or 2x8"):
        gpu_counts(text)


def made(counts, mem=None, gpu=None, bandwidth=None, network=None, chain=A100):
    platform, said = platform_of_gpus(counts, mem, gpu, bandwidth, network, None, chain)
    levels = [(level.count, level.bandwidth / 1e9) for level in platform.levels]
    return len(platform), platform.devices[0].memory_bytes / 1e9, levels, said


def test_what_is_not_said_comes_from_the_named_gpu_or_the_profile():
    assert made((4,), "16GB") == (
        4, 16, [(4, 12)], ["bandwidth 12 GB/s between any two GPUs (PCIe 3 x16)"]
    )  # fmt: skip
    assert made((8, 2), gpu="h100", network="400Gbps")[:3] == (16, 80, [(8, 450), (2, 50)])
    assert made((2,), "40G", "h100", "20GB/s") == (2, 40, [(2, 20)], [])
    count, memory, levels, said = made((2, 3))
    assert (count, memory, levels) == (6, 80, [(2, 300), (3, 12.5)])
    assert [x.split()[0] for x in said] == ["GPUs", "bandwidth", "network"]
    assert "like the profile's, NVIDIA A100 SXM 80GB" in said[0]


def test_what_nobody_knows_is_asked_for():
    with pytest.raises(BadInput, match=r"--mem is missing: .* measured on test"):
        made((2,), chain=CHAIN)
    with pytest.raises(BadInput, match="--network joins servers; say how many"):
        made((2,), "1GB", network="1Gbps")


def test_links_of_the_table_can_be_read():
    for name in accelerators():
        assert made((2,), gpu=name)[1] > 0


def test_the_names_are_listed(pipeplan):
    code, out, _ = pipeplan("list")
    assert code == 0
    assert "b200" in out and "zoo:llama3-8b" in out  # noqa: PT018
    code, out, err = pipeplan("plan", "profile.json", "--gpus", "nine")
    assert (code, "--gpus: 'nine' isn't a GPU count" in err) == (2, True)
