"""Which values of profiles and platforms are taken to the last one, and what is said of the first that isn't?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec
from cases.kept import check_kept

from pipeplan.errors import BadInput
from pipeplan.files import graph_txt
from pipeplan.files.machines import accelerators
from pipeplan.files.machines.accelerators import KINDS, accelerator, with_constants
from pipeplan.files.machines.platforms import PlatformFile, grouped, platform_form, platform_of, platform_of_gpus
from pipeplan.files.measured_runs import read_rows
from pipeplan.files.piper_json import AGAIN
from pipeplan.files.piper_json import KEPT as KEPT_BY
from pipeplan.files.profile_rules import check_chain
from pipeplan.files.profiles import profile_text, read_profile
from pipeplan.files.schedule_csv import read_schedule
from pipeplan.problem import Chain, Layer, Platform

KEPT = Path(__file__).with_name("values.txt")
NAMES, MOST = ("a", "b", "c", "d"), 10**15
LAYERS = tuple(Layer(x, 100, 200, 40, 10, saved_bytes=30, parameters=10) for x in NAMES)
CHAIN = Chain("four", LAYERS, 10, device="some CPU, 1 thread")
NEEDS = {"saved_bytes": 20, "gradient_bytes": 10, "saves": []}
PART = {"tensor": 2, "sequence_parallel": False, "layers": json.loads(profile_text(CHAIN))["layers"]}
ONE = {"kind": "all-reduce", "backward": False, "bytes": 8, "count": 2, "hidden": 1}
EDGES = [[0, 1], [1, 2], [2, 3]]
TIES = {"tied": [[0, 1]], "shared": [{"layers": [0, 1], "weight_bytes": 40, "parameters": 10}]}
PROFILE: list[dict[str, Any]] = [  # places, with dots between their parts, and what stands there
    {},
    *({"microbatch": x} for x in (1, 0)),
    *({"input_bytes": x} for x in (0, -1)),
    *({"reading_ns": x, "layers.3.forward_ns": y} for x, y in ((0, 9), (-1, 9), (100, 200), (101, 200), (50, 49))),
    {"reading_ns": 101, "device": "a GPU"},
    *({f"layers.1.{x}": y} for x in ("forward_ns", "weight_bytes", "optimizer_ns") for y in (0, -1, MOST, MOST - 300)),
    *({"layers.0.forward_ns": x, **{f"layers.{i}.forward_ns": 0 for i in (1, 2, 3)}} for x in (MOST, MOST + 1)),
    {f"layers.{i}.{x}": 0 for i in range(4) for x in ("forward_ns", "backward_ns")},
    {f"layers.{i}.{x}": 0 for i in range(3) for x in ("forward_ns", "backward_ns")},
    *({"layers.2.backward_weight_ns": x} for x in (0, 200, 201, -1)),
    {"layers": []},
    *({f"layers.{i}.name": "x" * n} for i, n in ((0, 10_000), (3, 10_001), (3, 10**6))),
    *({x: [[i, j]]} for x in ("edges", "tied") for i, j in ((0, 3), (0, 4), (-1, 2), (2, 2), (3, 2), (4, 5), (0, -1))),
    *({"edges": EDGES[1:], "layers.0.weight_bytes": x, "layers.0.parameters": 0, "inputs": y}
      for x, y in ((0, [0]), (4, [0]), (0, [1]), (0, [3]), (0, [4]), (0, [-1]), (0, []))),
    {"layers.0.weight_bytes": 0, "layers.0.parameters": 0, "inputs": [0]},
    *({"edges": EDGES, "order": x} for x in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4])),
    *({"layers.2.saves": x} for x in ([], [1], [2], [0], [-1], [3], [1, 2])),
    *({"layers.0.saves": x} for x in ([-1], [0], [1])),
    {"layers.2.saves": [1], "layers.2.saved_bytes": None},
    *({"layers.2.saves": [1, 2], "layers.2.saved_bytes": x} for x in (19, 20)),
    *({"layers.2.view_of": x, "layers.2.saved_bytes": 0} for x in (1, 2, 0)),
    *({"layers.2.view_of": 1, "layers.2.storage_bytes": x, "layers.2.saved_bytes": 0} for x in (0, 5)),
    *(
        {f"layers.{i}.weight_needs": NEEDS | {"saved_bytes": x} for i in range(4)}
        for x in (0, -1, MOST // 4, 1 + MOST // 4)
    ),
    {"layers.1.weight_needs": NEEDS},
    {f"layers.{i}.weight_needs": NEEDS | {"saves": [i - 2]} for i in range(4)},
    {f"layers.{i}.weight_needs": NEEDS | {"saves": [i - 1], "saved_bytes": 9} for i in range(4)},
    {f"layers.{i}.weight_needs": NEEDS | {"saves": [i - 1]} for i in range(4)},
    TIES,
    *(TIES | {"shared.0.layers": x} for x in ([0], [0, 4], [-1, 1], [1, 0], [1, 1], [0, 2], [0, 1, 2])),
    *(TIES | {"shared.0.weight_bytes": x} for x in (0, -1, 41)),
    *(TIES | {"shared.0.parameters": x} for x in (0, -1, 11)),
    TIES | {"tied": [[0, 1], [1, 2]]},
    {"variants": [PART]},
    *({"variants": [PART | {"tensor": x}]} for x in (1, 4096, 4097)),
    {"variants": [PART, PART]},
    {"variants": [PART], "tensor": 2},
    *({"variants": [PART], x: y} for x, y in (("context", 2), ("selective", True), ("offloaded", 10**9))),
    {"edges": [[0, 1], [0, 2], [2, 3]], "layers.0.output_bytes": MOST // 2, "layers.3.output_bytes": MOST // 4},
    {"variants": [PART | {"layers": PART["layers"][::-1]}]},
    {"variants": [PART], "variants.0.layers.1.forward_ns": -1},
    *({"variants": [PART], "variants.0.layers.1.own_parameters": x} for x in (0, 10, 11, -1)),
    *(
        {"variants": [PART], "variants.0.layers.1.exchanges": [ONE | {x: y}]}
        for x, y in (
            ("hidden", 2), ("hidden", 3), ("hidden", 0), ("hidden", -1), ("count", 1000), ("count", 1001), ("count", 0),
            ("bytes", MOST // 1000), ("bytes", MOST // 1000 + 1), ("ranks", 2), ("ranks", 3), ("ranks", 1),
            ("apart", 1), ("apart", 2), ("beside_ns", MOST), ("beside_ns", MOST + 1),
        )
    ),
]  # fmt: skip
LEVEL = {"count": 2, "bandwidth": "1GB/s"}
TIMES = {"name": "slow", **{f"{x}_ns": [200] * 4 for x in ("forward", "backward", "backward_weight", "optimizer")}}
OWN = {"devices": [{"profile": "slow"}, {}], "times": [TIMES]}
PLATFORM: list[dict[str, Any]] = [
    {},
    {"levels": []},
    *({"levels.0.count": x} for x in (0, 1, 4096, 4097)),
    *({"levels.0.links": x} for x in (0, 1, 4096, 4097)),
    *({"levels": [LEVEL | {"count": 64}, LEVEL | {"count": x}]} for x in (64, 65)),
    {"levels": [LEVEL | {"links": 1}, LEVEL | {"links": 1}]},
    {"levels": [LEVEL, LEVEL | {"links": 2, "latency": "3us"}]},
    *({"levels.0.latency": x} for x in ("5us", "-5us", "5")),
    *({"devices": x} for x in ([], [{}], [{}, {"memory": "2GB"}], [{}, {"memory": "2"}])),
    {"memory": None},
    {"memory": None, "devices": [{"memory": "1GB"}, {}]},
    *(
        {"devices": [{}, {"speed": x}]}
        for x in (0.001, 0.0009, 1000, 1001, 1, 0.5, 0.3333, 0.333, 2 / 3, 2 / 1001, 1.0005, 999.999)
    ),
    *({"overhead": x} for x in ("2us", "0us", "x")),
    *({"reserve": x} for x in ("1MB", "999MB", "1GB", "2GB", "0B")),
    {"memory": "0B", "reserve": "0B"},
    {"full_duplex": True, "blocking_transfers": True},
    OWN,
    {"devices": [{"profile": "other"}, {}], "times": [TIMES]},
    *(OWN | {f"times.0.{x}": [200] * 3} for x in TIMES if x != "name"),
    OWN | {"times.0.backward_ns": [100] * 4},
]
GPUS: list[tuple[Any, ...]] = [  # counts, memory, GPU, bandwidth, network, latency
    ((2,), "1GB", None, None, None, None),
    ((2,), "1GB", None, None, "1GB/s", None),
    ((2,), "1GB", None, "1GB/s", None, "2us"),
    ((2, 3), "1GB", None, None, None, None),
    ((2, 3), "1GB", None, None, "1GB/s", "2us"),
    ((2, 3), "1GB", "a100", None, None, None),
    ((2,), None, "a100", None, None, None),
    ((2,), None, "rtx4090", None, None, None),
    ((2,), None, None, None, None, None),
]


def changed(form: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return a document with some of its places changed."""
    made = deepcopy(form)
    for place, value in change.items():
        *before, last = place.split(".")
        at: Any = made
        for part in before:
            at = at[int(part) if isinstance(at, list) else part]
        if value is None:
            del at[last]
        else:
            at[int(last) if isinstance(at, list) else last] = deepcopy(value)
    return made


def label(change: dict[str, Any]) -> str:
    """Return a change in a line, what is long and always the same left out."""
    text = json.dumps(change)
    for long, short in ((PART["layers"], "LAYERS"), (PART["layers"][::-1], "LAYERS, BACKWARDS"), (TIMES, "TIMES")):
        text = text.replace(json.dumps(long), short)
    return re.sub("x{50,}", "xx..", text)


def named(letters: int) -> tuple[Layer, ...]:
    return (LAYERS[0], replace(CHAIN.layers[1], name="x" * letters))


def told() -> str:
    """Return what is said of each change: that it is read, and comes back, or why it isn't."""
    lines = []
    form = json.loads(profile_text(CHAIN))
    for change in PROFILE:
        try:
            chain = read_profile("p", json.dumps(changed(form, change)))
            assert read_profile("p", profile_text(chain)) == chain
            said = "taken"
        except BadInput as error:
            said = str(error)
        lines.append(f"{label(change)}: {said}")
    for fields in (
        {"microbatch": 0},
        {"microbatch": 1},
        {"layers": ()},
        *({"layers": named(n)} for n in (10**4, 10**5)),
    ):
        try:
            check_chain(replace(CHAIN, **fields), "p")
            lines.append("taken")
        except BadInput as error:
            lines.append(str(error))
    for change in PLATFORM:
        try:
            platform = platform_of(
                msgspec.convert(changed({"levels": [LEVEL], "memory": "1GB"}, change), PlatformFile), "p", CHAIN
            )
            said = msgspec.json.encode(platform_form(platform)).decode()
            assert platform_of(platform_form(platform), "p", CHAIN) == platform
            lines.append(f"{label(change)}: {said}")
        except BadInput as error:
            lines.append(f"{label(change)}: {error}")
    for words in GPUS:
        try:
            platform, assumed = platform_of_gpus(*words, CHAIN)
            lines.append(f"{words}: {len(platform)} {platform.devices[0]} {platform.levels} {assumed}")
        except BadInput as error:
            lines.append(f"{words}: {error}")
    with TemporaryDirectory() as folder:
        return "\n".join([*lines, *of_limits(), *of_accelerators(), *of_texts(Path(folder))]) + "\n"


def piper(number: int, kept: float | None, again: float | None = None, name: str = "", degrees: Any = ("1",)) -> Any:
    """Return a node of an input of Piper's, of so many milliseconds."""
    about = {"parameterSize": 3.5, "memoryUsageA": 2.4}
    ways = [
        {"id": x, "timePerSample": y / 1000, **about} for x, y in ((KEPT_BY, kept), (AGAIN, again)) if y is not None
    ]
    return {"id": number, "name": name, "TMPCs": dict.fromkeys(degrees, ways)}


NODE = (
    "node{0} -- ReLU(x) -- forward_compute_time={0}, backward_compute_time=2, activation_size={1}, parameter_size=4.5"
)
SIZES, COST = "[1.5; 2; 3.0]", "communicationCost"
FIRST, SECOND, THIRD = (NODE.format(i, SIZES) for i in (1, 2, 30))
BOTH = f"{FIRST}\n{SECOND}\n"
TEXTS: dict[Callable[[str], Any], Sequence[str]] = {
    read_rows: (
        "ms", "ms\n1", "ms,ms\n1,1", "gb\n1", "ms,x\n1,1", "", " ms , gb \n 1 , 2 \n\n,\n", "ms\n0", "ms\n-1",
        "ms\n1e12",
        "ms\n9e11", "ms\nnan", "ms,gb\n1,x", "ms,gb\n1,", "ms,batch\n1", "ms\n1,2", "ms,batch\n1,8",
    ),
    lambda path: len(read_rows(path)): ["ms\n" + "1\n" * n for n in (10**4, 10**4 + 1)],
    lambda path: [row.count("batch") for row in read_rows(path)]: [
        f"ms,batch\n1,{x}" for x in ("8", "", "0", "999999999", "1234567890", "-1", "x", "\u0663")
    ],
    read_profile: (
        FIRST, f"{BOTH}\tnode1 -- node2\n", BOTH, f"{FIRST}\n{FIRST}", f"{BOTH}\tnode1 -- node3",
        f"{BOTH}\tnode1 -- node2\n  node2 -- node1", f"{SECOND}\n{FIRST}\n\tnode1 -- node2", f"{FIRST}\n\tx", "x\n",
        f"{BOTH}{THIRD}\n node1 -- node2\n node1 -- node30\n node2 -- node30", FIRST.replace("=1,", "=-1,"),
        FIRST.replace("=1,", "=x,"), FIRST.replace("node1", "node" + "1" * 19), FIRST.replace("node1 ", "n1 "),
        FIRST.replace(SIZES, "[1.5; 2"), FIRST.replace(SIZES, "1e3"), f"\ufeff{FIRST}\n\n \n",
    ),
    lambda path: read_profile(path, Path(path).read_text()): [
        json.dumps({"nodes": nodes, "edges": [dict(zip(("sourceId", "destId", COST), x, strict=True)) for x in edges]})
        for nodes, edges in (
            ([piper(1, 3), piper(0, 4, 5, name="in")], [(0, 1, 7.5), (0, 1, 8.4)]),
            ([piper(1, 3, 6), piper(0, 4, 8.000001), piper(2, 4, 4)], [(0, 1, 7.5), (0, 2, 9.5)]),
            ([piper(0, 3, 2, degrees=("1", "2", "x", "01", "2048"))], []),
            ([piper(0, 3, 2, degrees=("2",))], []),
            ([piper(0, 3), piper(1, 3, degrees=("1", "2"))], [(0, 1, 1)]),
            ([piper(0, 3), piper(0, 3)], []),
            ([piper(0, 3)], [(0, 1, 1)]),
            ([piper(0, 3), piper(1, 3)], [(0, 1, 1), (1, 0, 1)]),
            ([piper(0, None, 3)], []),
            ([piper(0, 0)], []),
            ([], []),
        )
    ],
    read_schedule: (
        "0F0,0B0", "0F0,0B0\n\n1F0", "0F0,,0B0\n", "0F0,0X0", "", ",", "0F0,0I0,0W0", "0F-1", "0SEND_F0", "99999999F0",
        "0F0,0UNSHARD,(0F1;0B0)OVERLAP_F_B", "0F0,(0F1;x)OVERLAP_F_B", "0F0,1REDUCE_GRAD2\n\n\n",
    ),
}  # fmt: skip


def of_texts(folder: Path) -> Iterator[str]:
    """Yield what is read of texts that are no JSON, or why they aren't."""
    for read, texts in TEXTS.items():
        for i, text in enumerate(texts):
            path = folder / f"{i}.{'txt' if read == read_profile else 'csv'}"
            path.write_text(text)
            try:
                found = read(str(path))
                told = json.dumps(json.loads(profile_text(found))) if isinstance(found, Chain) else repr(found)
            except BadInput as error:
                told = f"! {error}"
            yield f"{text[-60:]!r}: {told.replace(str(folder), '')}"


def of_limits() -> Iterator[str]:
    """Yield what is said at limits that no small file meets, and of groups of four GPUs."""
    three = f"{BOTH}{THIRD}\n node1 -- node2\n node1 -- node30\n node2 -- node30"
    for limits in ({"MOST_LAYERS": 3, "MOST_EDGES": 3}, {"MOST_LAYERS": 2}, {"MOST_EDGES": 2}):
        with patch.multiple(graph_txt, **limits):
            try:
                yield f"{limits}: {len(graph_txt.read_graph_text(three, 'g', 'g'))}"
            except BadInput as error:
                yield f"{limits}: {error}"
    for count in (4, 6):
        try:
            yield f"{len(grouped(Platform.flat(count, 10**9, 10**9), replace(CHAIN, tensor=4), 'p'))}"
        except BadInput as error:
            yield str(error)


def of_accelerators() -> Iterator[str]:
    """Yield what kernels reach on GPUs of the table, and what is taken of others."""
    for name in ("v100", "a100", "h200", "rtx4090"):
        gpu = accelerator(name)
        for number, last in (("float32", False), ("float16", False), ("bfloat16", True), ("tf32", False)):
            yield f"{name} {number} {last}: {[gpu.rate(kind, number, last) for kind in KINDS]}"
        for within in (None, (0.5, 2.0)):
            yield f"{name} {within}: {with_constants(gpu, gpu.constants(), 'runs', within)}"
        types = ("float32", "float16", "float8_e4m3fn")
        yield f"{name}: {[gpu.number(dtype, kind) for dtype in types for kind in KINDS[::4]]}"
        for host in (None, "20us", "graphs", "9us,30us"):
            with patch.object(accelerators, "spread_of_hosts", lambda *x: (x[2][0][0] / 10**4, x[2][1][1] / 10**4)):
                ranges = [gpu.range_of(CHAIN, gpu.constants(host), x) for x in (False, True)]
            yield f"{name} {host}: {ranges}"
    own = {"name": "x", "memory": "8GB", "bandwidth": "5GB/s", "tflops": {"float32": 1.0}}
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.json")
        for more in (
            *({"rates": {"softmax": x}} for x in (100, 101, [0.1, 100], [0.1, 101], [0, 1], 0)),
            *({"rates": x} for x in ("h200", "h2000")),
            *({"tflops": x} for x in ({"float32": 0}, {"float32": -1, "tf32": 2}, {"float32": 3, "tf32": 2})),
            *({"host_time": x} for x in ("2us", "x", "compiled", "2us,3us,4us")),
        ):
            path.write_text(json.dumps(own | more))
            try:
                found = accelerator(str(path))
                reached = found.rate("softmax", "float32"), found.number("float32", "convolution"), found.constants()
                yield f"{more}: {reached}"
            except BadInput as error:
                yield f"{more}: {str(error).replace(folder, '')}"


def test_what_is_taken_and_what_is_said_of_the_first_value_that_is_not_is_what_is_kept() -> None:
    check_kept(told(), KEPT)
