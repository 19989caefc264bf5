"""Profiles as JSON: they come back as they were, and what is wrong with one is said in a sentence."""

import json
import random
import re
from dataclasses import replace

import pytest
from cases.chains import PUBLISHED, published, random_chain
from cases.files import CHAIN, assert_refused, edited, written

from pipeplan.errors import BadInput
from pipeplan.files.piper_json import AGAIN, KEPT
from pipeplan.files.profiles import digest, profile_text, read_profile
from pipeplan.problem import Layer


def test_profiles_come_back_byte_for_byte(tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        chain = random_chain(
            rng, rng.randint(1, 8), edges=seed % 2 > 0, saved=seed % 3 > 0, optimizer=seed % 5 > 0, tied=seed % 7 == 0
        )
        text = profile_text(chain)
        again = read_profile(written(tmp_path, text))
        assert again == chain
        assert profile_text(again) == text
        assert digest(again) == digest(chain)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_profiles_come_back(name, tmp_path):
    chain = published(name)
    assert read_profile(written(tmp_path, profile_text(chain))) == chain


def test_a_graph_text_is_read_wherever_a_profile_is(tmp_path):
    text = (
        "node1 -- ReLU -- forward_compute_time=0.5, backward_compute_time=0.25, activation_size=8, parameter_size=0\n"
    )
    chain = read_profile(written(tmp_path, text, "net.graph.txt"))
    assert (chain.name, chain.layers[0].forward_ns, chain.layers[0].output_bytes) == ("net", 500_000, 8)


def test_digests_tell_profiles_apart():
    chains = [CHAIN, replace(CHAIN, name="other"), replace(CHAIN, input_bytes=41), replace(CHAIN, edges=())]
    chains.append(replace(CHAIN, layers=(*CHAIN.layers[:3], replace(CHAIN.layers[3], saved_bytes=None))))
    assert len({digest(chain) for chain in chains}) == len(chains)


def test_a_byte_order_mark_is_no_obstacle(tmp_path):
    path = tmp_path / "marked.json"
    path.write_bytes(b"\xef\xbb\xbf" + profile_text(CHAIN).encode())
    assert read_profile(str(path)) == CHAIN


def shared(*layers, weight_bytes=0):
    return {"layers": list(layers), "weight_bytes": weight_bytes}


PROFILE = json.loads(profile_text(replace(CHAIN, edges=((0, 1), (1, 2), (0, 2), (2, 3)), tied=((0, 3),))))

LAYER = ("layers", 2)

BAD_PROFILES = {
    "version": (("format",), "pipeplan-profile/2", "Invalid enum value 'pipeplan-profile/2' - at `$.format`"),
    "no format": (("format",), ..., "missing required field `format`"),
    "no layers": (("layers",), ..., "missing required field `layers`"),
    "unknown key": (("colour",), 1, "unknown field `colour`"),
    "unknown key in a layer": ((*LAYER, "forward_ms"), 1, "unknown field `forward_ms` - at `$.layers[2]`"),
    "missing time": ((*LAYER, "forward_ns"), ..., "missing required field `forward_ns` - at `$.layers[2]`"),
    "negative": ((*LAYER, "forward_ns"), -2, "$.layers[2].forward_ns: -2 is negative"),
    "negative size": ((*LAYER, "output_bytes"), -2, "$.layers[2].output_bytes: -2 is negative"),
    "negative saved": ((*LAYER, "saved_bytes"), -2, "$.layers[2].saved_bytes: -2 is negative"),
    "float": ((*LAYER, "forward_ns"), 1.5, "expected `int`, got `float` - at `$.layers[2].forward_ns`"),
    "bool": ((*LAYER, "forward_ns"), True, "expected `int`, got `bool` - at `$.layers[2].forward_ns`"),
    "text": ((*LAYER, "weight_bytes"), "4MB", "expected `int`, got `str` - at `$.layers[2].weight_bytes`"),
    "null": ((*LAYER, "weight_bytes"), None, "expected `int`, got `null` - at `$.layers[2].weight_bytes`"),
    "list": ((*LAYER, "weight_bytes"), [1], "expected `int`, got `array` - at `$.layers[2].weight_bytes`"),
    "layers as object": (("layers",), {}, "expected `array`, got `object` - at `$.layers`"),
    "name": ((*LAYER, "name"), 3, "expected `str`, got `int` - at `$.layers[2].name`"),
    "huge": ((*LAYER, "weight_bytes"), 10**30, "$.layers[2].weight_bytes: the layers up to here sum up to"),
    "sums": ((*LAYER, "forward_ns"), 10**15, "$.layers[2].forward_ns: the layers up to here sum up to"),
    "edge of three": (("edges", 0), [0, 1, 2], "expected `array` of length 2 - at `$.edges[0]`"),
    "edges of too many": (("layers",), PROFILE["layers"] * 1001, "$.edges: 4004 layers with edges; up to 4000 can be"),
    "tied outside": (("tied", 0), [0, 9], "tied[0]: [0, 9] names a layer that is not there"),
    "tied back": (("tied", 0), [3, 0], "tied[0]: [3, 0] must name an earlier layer first"),
    "shared by one": (("shared",), [shared(3)], "shared[0].layers: [3] are not two or more of the 4 layers"),
    "shared outside": (("shared",), [shared(0, 4)], "shared[0].layers: [0, 4] are not two or more of the 4 layers"),
    "shared back": (("shared",), [shared(3, 0)], "shared[0].layers: [3, 0] must come in order, each once"),
    "shared by others": (("shared",), [shared(0, 2)], "shared: connects other layers than $.tied does"),
    "shared by none": (("shared",), [], "shared: connects other layers than $.tied does"),
    "shared less": (("shared",), [shared(0, 3, weight_bytes=-4)], "shared[0]: weight_bytes and parameters cannot be"),
    "shared more": (
        ("shared",), [shared(0, 3, weight_bytes=10**6)], "layers[0]: shares 1000000 bytes of weights by $.shared, and",
    ),
    "shared otherwise": (("shared",), [shared(0, 3) | {"bytes": 3}], "unknown field `bytes` - at `$.shared[0]`"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PROFILES)
def test_bad_profiles(name, tmp_path):
    assert_refused(read_profile, tmp_path, PROFILE, BAD_PROFILES[name])


BROKEN = {
    "empty": ("", "is empty; a profile is JSON or a graph.txt"),
    "white space": (" \n\t", "is empty"),
    "cut off": (profile_text(CHAIN)[:200], "input data was truncated"),
    "brace": ("{", "input data was truncated"),
    "list": ("[1, 2]", "expected `object`, got `array`"),
    "comma": ('{"format": "pipeplan-profile/1",}', "JSON is malformed"),
    "comment": (profile_text(CHAIN) + "// no", "JSON is malformed: trailing characters"),
    "NaN": (json.dumps(edited(PROFILE, ("input_bytes",), float("nan"))), "JSON is malformed"),
    "Infinity": (json.dumps(edited(PROFILE, ("input_bytes",), float("inf"))), "JSON is malformed"),
    "infinite": (json.dumps(PROFILE).replace('"input_bytes": 40', '"input_bytes": 1e999'), "out of range"),
    "digits": (json.dumps(PROFILE).replace('"input_bytes": 40', '"input_bytes": ' + "9" * 5000), "out of range"),
    "forty": (json.dumps(PROFILE).replace('"input_bytes": 40', '"input_bytes": ' + "9" * 40), "more than 1e15"),
    "deep": ('{"format": ' + "[" * 10**5, "expected"),
    "prose": ("hello", "is not a node"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name, tmp_path):
    text, sentence = BROKEN[name]
    with pytest.raises(BadInput, match=sentence) as caught:
        read_profile(written(tmp_path, text))
    assert str(tmp_path) in str(caught.value)


def test_piper_s_inputs_are_read_wherever_a_profile_is(tmp_path):
    def ways(*times):
        return [{"id": x, "timePerSample": t, "parameterSize": 30.4, "memoryUsageA": 20.6} for x, t in times]

    plain, both = ways((KEPT, 3e-6)), ways((KEPT, 3e-6), (AGAIN, 4e-6))
    nodes = [
        {"id": 7, "name": "a", "TMPCs": {"1": both, "2": plain}},
        {"id": 3, "TMPCs": {"1": plain, "2": plain, "4": plain}},
    ]
    edges = [{"sourceId": 7, "destId": 3, "communicationCost": 5.4}]
    found = read_profile(written(tmp_path, json.dumps({"nodes": nodes, "edges": edges}), "net.x.json"))
    assert (found.name, found.edges, found.input_bytes, found.source) == (
        "net", ((0, 1),), 0, f"Piper input {tmp_path}/net.x.json",
    )  # fmt: skip
    wanted = (Layer("a-7", 1000, 2000, 30, 5, 21), Layer("layer-3", 1000, 2000, 30, 0, 21))
    assert found.layers == wanted
    assert [(x.tensor, x.selective, x.layers) for x in found.variants] == [(2, False, wanted)]
    for change, words in (
        (
            {"edges": [*edges, {"sourceId": 3, "destId": 7, "communicationCost": 1}]},
            "don't make an acyclic graph of the",
        ),
        ({"edges": [{"sourceId": 7, "destId": 4, "communicationCost": 1}]}, "they don't make an acyclic graph"),
        ({"nodes": [*nodes, nodes[0]]}, "they don't make an acyclic graph of the nodes, each once"),
        (
            {"nodes": [{"id": 7, "TMPCs": {"2": plain}}, nodes[1]]},
            "$.nodes: not all of them have ways to run on one GPU",
        ),
        ({"nodes": [nodes[0], {"id": 3, "TMPCs": {"1": ways((AGAIN, 1e-6))}}]}, f"node 3 has no '{KEPT}' of degree 1"),
    ):
        with pytest.raises(BadInput, match=re.escape(words)):
            read_profile(written(tmp_path, json.dumps({"nodes": nodes, "edges": edges, **change})))
