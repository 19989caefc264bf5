"""The files in profiles/: small, readable, of the networks they name, and honest about where they come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeplan.cost.memory_model import weights_of
from pipeplan.cost.saved import saved_bytes
from pipeplan.files.profiles import profile_text, read_profile

FOLDER = Path(__file__).parents[2] / "profiles"
FILES = sorted(FOLDER.glob("*.json"))
PUBLISHED = sorted((FOLDER / "published").glob("*.json"))
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "inception-v3": 23_834_568,
    "densenet121": 7_978_856,
    "vgg16": 138_357_544,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_is_canonical_and_says_where_it_comes_from(path: Path) -> None:
    chain = read_profile(str(path))
    assert profile_text(chain) == path.read_text()
    assert path.stat().st_size < 300_000
    assert re.search(
        r"(estimated|measured) by pipeplan [0-9.]+, (one layer at a time, )?torch [0-9.+a-z]+", chain.source
    )
    assert re.search(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}$", chain.source)
    assert ("(estimated)" in chain.device) == chain.source.startswith("estimated")
    assert f"-b{chain.microbatch}-" in path.name
    assert chain.layers[-1].name == "loss"
    assert sum(x.forward_ns + x.backward_ns for x in chain.layers) > 10**6
    name = chain.name.split(",")[0]
    if name in PARAMETERS:
        assert (chain.shared is None) == (not chain.tied)
        assert weights_of(chain, 0, len(chain))[1] == PARAMETERS[name]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_profiles_are_canonical_and_say_where_they_come_from(path: Path) -> None:
    chain = read_profile(str(path))
    assert profile_text(chain) == path.read_text()
    assert path.stat().st_size < 100_000
    assert (chain.name, chain.device) == (path.stem, "V100")
    assert chain.source == "PipeDream (Narayanan et al. 2019), published profile, V100, MIT licence"
    assert chain.edges is not None
    assert not any(layer.name.startswith("Input") for layer in chain.layers)


def test_the_published_networks_are_there() -> None:
    names = {"alexnet", "densenet121", "gnmt", "gnmt_large", "resnet50", "vgg16"}
    assert {path.stem for path in PUBLISHED} == names


def test_the_papers_networks_are_there_at_their_size() -> None:
    stems = {path.stem for path in FILES}
    for name in ("resnet50", "resnet101", "inception-v3", "densenet121"):
        found = next(stem for stem in stems if stem.startswith(f"{name}-1000-b8"))
        chain = read_profile(str(FOLDER / f"{found}.json"))
        assert chain.input_bytes == 8 * 3 * 1000 * 1000 * 4
    assert {"gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl"} <= {stem.rsplit("-b", 1)[0] for stem in stems}


def test_resnet50_saves_what_a_real_run_was_seen_to_hold() -> None:
    chain = read_profile(str(FOLDER / "resnet50-1000-b8-v100.json"))
    assert int(saved_bytes(chain, 0, len(chain))) // 2**20 == 13_128
