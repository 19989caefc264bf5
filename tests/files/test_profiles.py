from __future__ import annotations

from dataclasses import replace

import pytest
from cases.chains import PUBLISHED, published

from pipeplan.errors import BadInput
from pipeplan.files.graph_txt import read_graph_text
from pipeplan.files.profile_rules import LARGEST_TOTAL, check_chain
from pipeplan.problem import Chain, Layer, WeightNeeds


def node(
    number: int,
    kind: str = "ReLU(inplace)",
    forward: str = "1",
    backward: str = "2",
    size: str = "8",
    weight: str = "0",
) -> str:
    return (
        f"node{number} -- {kind} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={size}, parameter_size={weight}"
    )


GRAPH = "\n".join(
    [
        "\tnode1 -- node2",
        node(10, "Linear(in_features=4, out_features=2)", "0.2505", "1e-3", "[16.0; 8.0; 8.0]", "64.000"),
        node(2, "Conv2d(3, 64, kernel_size=(3, 3))", "4.446", "0.0000005", "1644167168.000", "7168.0"),
        node(3, "Add -- odd"),
        node(1, "Input0", size="100"),
        node(4, "Input1", size="11.0"),
        "",
        "\tnode2 -- node3",
        "\tnode2 -- node10",
        "\tnode3 -- node10",
        "\tnode4 -- node3",
    ]
)


def test_a_graph_is_read_in_any_order() -> None:
    chain = read_graph_text(GRAPH, "toy", "toy.txt", microbatch=32)
    assert [x.name for x in chain.layers] == ["Conv2d-2", "Add-3", "Linear-10"]
    assert chain.layers[2] == Layer("Linear-10", 250_500, 1_000, 64, 32)
    assert (chain.layers[0].forward_ns, chain.layers[0].backward_ns) == (4_446_000, 0), "0.5 ns rounds to even"
    assert chain.edges == ((0, 1), (0, 2), (1, 2))
    assert (chain.input_bytes, chain.microbatch, chain.name) == (111, 32, "toy")
    assert "toy.txt" in chain.source


def test_a_linear_graph_is_a_plain_chain() -> None:
    text = "\n".join([node(1), node(2), node(3), "\tnode1 -- node2", "\tnode2 -- node3", "\tnode1 -- node2"])
    assert read_graph_text(text, "x", "x").edges is None


def test_windows_line_ends_a_byte_order_mark_and_stage_ids_are_read() -> None:
    text = "\ufeff" + "\r\n".join([f"{node(1)} -- stage_id=3", node(2), "\tnode1 -- node2", ""])
    assert read_graph_text(text, "x", "x") == read_graph_text(
        "\n".join([node(1), node(2), "\tnode1 -- node2"]), "x", "x"
    )


def test_order_follows_the_numbers_where_it_can() -> None:
    text = "\n".join([node(i) for i in (9, 1, 5, 12)] + ["\tnode9 -- node5", "\tnode1 -- node12", "\tnode5 -- node12"])
    chain = read_graph_text(text, "x", "x")
    assert [x.name for x in chain.layers] == ["ReLU-1", "ReLU-9", "ReLU-5", "ReLU-12"]


PAIR = [node(1), node(2), "\tnode1 -- node2"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "g.txt: there is no node in it"),
        ([node(1, "Input")], "g.txt: there is no layer in it, only inputs"),
        ([node(1, forward="NaN")], "g.txt line 1: forward_compute_time='NaN' is not a number"),
        ([node(1, backward="inf")], "g.txt line 1: backward_compute_time='inf' is not a number"),
        ([node(1, weight="1/3")], "parameter_size='1/3' is not a number"),
        ([node(1, size="1e999999999")], "activation_size='1e999999999' is not a number"),
        ([node(1, size="[1.0; x]")], "activation_size='[1.0; x]' is not a number"),
        ([node(1, size="[12")], "activation_size='[12' is not a number"),
        ([node(1, size="[]")], "activation_size='[]' is not a number"),
        ([node(1, size="[8; -4]")], "activation_size='[8; -4]' is negative"),
        ([*PAIR, node(3, forward="-2")], "g.txt line 4: forward_compute_time='-2' is negative"),
        ([*PAIR, node(1)], "g.txt line 4: node1 is there twice, first in g.txt line 1"),
        ([*PAIR, "\tnode2 -- node7"], "g.txt line 4: the edge names 'node7', which is not a node"),
        ([*PAIR, "\tnode2 node1"], "g.txt line 4: '\\tnode2 node1' is not an edge such as"),
        ([*PAIR, "\tnode2 -- node1"], "the edges go round in a cycle: node1 -> node2 -> node1"),
        ([*PAIR, "\tnode2 -- node2"], "the edges go round in a cycle: node2 -> node2"),
        ([node(1), node(2)], "g.txt: 2 nodes and not one edge"),
        (["layer1 -- ReLU"], "g.txt line 1: 'layer1 -- ReLU' is not a node such as"),
        ([node(1).replace("node1", "conv1")], "g.txt line 1: 'conv1' is not a node's name"),
        ([node(1, forward="0", backward="0")], "all forward and backward times are 0"),
        ([node(1, "x" * 10_001)], "g.txt line 1.name: 10003 characters; a name has up to 10000"),
        ([node(1, weight="2e15")], "g.txt line 1.weight_bytes: the layers up to here sum up to 2000000000000000"),
    ],
)
def test_malformed_graphs_are_refused_with_their_place(lines: list[str], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_graph_text("\n".join(lines), "g", "g.txt")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [*PUBLISHED, "gnmt_large"])
def test_published_profiles_keep_their_totals(name: str) -> None:
    chain = published(name)
    layers, milliseconds = {
        "alexnet": (22, 85.321),
        "densenet121": (428, 326.155),
        "gnmt": (45, 89.416),
        "gnmt_large": (93, 520.453),
        "resnet50": (176, 443.419),
        "vgg16": (40, 672.535),
    }[name]
    total = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    assert (len(chain), total) == (layers, round(milliseconds * 10**6))
    assert all(i < j for i, j in chain.edges or ())


GOOD = Chain("good", (Layer("a", 1, 2, 3, 4), Layer("b", 1, 2, 3, 4)), 5)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (replace(GOOD, layers=()), "p: there are no layers"),
        (replace(GOOD, layers=(GOOD.layers[0], Layer("b", -2, 0, 0, 0))), "layers[1].forward_ns: -2 is negative"),
        (replace(GOOD, layers=(Layer("a", 1, 1, 1, 1, saved_bytes=-1),)), "layers[0].saved_bytes: -1 is negative"),
        (replace(GOOD, layers=(Layer("a", 1, 1, 1, 1, optimizer_ns=-9),)), "layers[0].optimizer_ns: -9 is negative"),
        (replace(GOOD, layers=(Layer("a", 1, 1, 1, 1, parameters=-9),)), "layers[0].parameters: -9 is negative"),
        (replace(GOOD, reading_ns=-1), "$.reading_ns: -1 is negative"),
        (replace(GOOD, reading_ns=2), "$.reading_ns: 2 is more than layers[0].forward_ns, 1, which includes it"),
        (
            replace(GOOD, layers=(Layer("a", 3, 2, 3, 4), GOOD.layers[1]), reading_ns=2),
            "$.reading_ns: 2 is more than layers[1].forward_ns, 1, which includes it",
        ),
        (
            replace(GOOD, layers=(Layer("a", 1, 5, 1, 1, backward_weight_ns=6),)),
            "layers[0].backward_weight_ns: 6 is more than backward_ns, 5",
        ),
        (
            replace(GOOD, layers=(GOOD.layers[0], Layer("b", 1, 2, 3, 4, weight_needs=WeightNeeds(4, (0,), 4)))),
            "layers[0].weight_needs: is missing; layer 1 has it, and all have it or none",
        ),
        (
            replace(GOOD, layers=(Layer("a", 1, 2, 3, 4, weight_needs=WeightNeeds(4, (1,), 4)),)),
            "layers[0].weight_needs.saves: 1 is not something that the layer reads or makes",
        ),
        (
            replace(GOOD, layers=(Layer("a", 1, 2, 3, 4, weight_needs=WeightNeeds(4, (-1,), 4)),)),
            "layers[0].weight_needs.saved_bytes: 4 is less than what saves names, which takes 5",
        ),
        (
            replace(GOOD, layers=(Layer("a", 1, 2, 3, 4, weight_needs=WeightNeeds(4, (), -4)),)),
            "layers[0].weight_needs.gradient_bytes: -4 is negative",
        ),
        (replace(GOOD, layers=(Layer("a", 0, 0, 1, 1),)), "all forward and backward times are 0"),
        (replace(GOOD, input_bytes=-5), "input_bytes: -5 is negative"),
        (replace(GOOD, microbatch=0), "microbatch: 0 is not positive"),
        (replace(GOOD, edges=((0, 1), (1, 1))), "edges[1]: [1, 1] must name an earlier layer first"),
        (replace(GOOD, edges=((0, 2),)), "edges[0]: [0, 2] names a layer that is not there; there are 2"),
        (replace(GOOD, tied=((-1, 1),)), "tied[0]: [-1, 1] names a layer that is not there"),
        (
            replace(GOOD, layers=(Layer("a", 2**62, 1, 1, 1), Layer("b", 2**62, 1, 1, 1))),
            "layers[0].forward_ns: the layers up to here sum up to",
        ),
        (replace(GOOD, input_bytes=2**62), "the tensors that layers read sum up to"),
    ],
)
def test_values_that_make_no_sense_are_refused(chain: Chain, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_chain(chain, "p")
    assert message in str(caught.value)


def test_the_largest_values_pass() -> None:
    half = LARGEST_TOTAL // 2
    check_chain(replace(GOOD, layers=(Layer("a", half, half, half, half), Layer("b", half, half, half, 0))), "p")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"saved_bytes": 3, "saves": (0,)}, r"saved_bytes: 3 is less than what saves names, which takes 10"),
        ({"saved_bytes": 30, "saves": (2,)}, r"saves: 2 is not something that the layer reads or makes; .* reads 0"),
        ({"saved_bytes": 30, "saves": (-1,)}, r"saves: -1 is not something that the layer reads or makes"),
        ({"saves": (0,)}, r"saves: says what is saved, but saved_bytes is missing"),
        ({"view_of": 1}, r"view_of: 1 is not something that the layer reads"),
        ({"view_of": 0, "storage_bytes": 9}, r"storage_bytes: a view has no storage of its own"),
        ({"storage_bytes": -1}, r"storage_bytes: -1 is negative"),
    ],
)
def test_layers_save_what_they_read_or_make(fields, message):
    layers = (Layer("a", 1, 1, 0, 10), Layer("b", 1, 1, 0, 20, **fields), Layer("c", 1, 1, 0, 30))
    with pytest.raises(BadInput, match=rf"layers\[1\]\.{message}"):
        check_chain(Chain("wrong", layers, 5), "p")


def test_layers_may_save_all_they_read_and_make():
    fields = {"saved_bytes": 30, "saves": (0, 1)}
    layers = (Layer("a", 1, 1, 0, 10), Layer("b", 1, 1, 0, 20, **fields), Layer("c", 1, 1, 0, 30, view_of=1))
    check_chain(Chain("right", layers, 5), "p")
