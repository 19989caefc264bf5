"""Does a framework's own code take what is exported, with every parameter in exactly one stage?

Of a checkout of its source only the parser or the splitter is run, on stand-ins for what it imports and doesn't need.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn

from pipeplan.problem import Chain
from scripts.checks.torch_pipeline import split_up


class Case:
    """A network: its profile, and as deep a model with few numbers, as a list of layers or as it is traced."""

    def __init__(self, name: str, profile: Callable[[], Chain], small: Callable[[], nn.Module], example: Any) -> None:
        self.name, self.profile, self.small, self.example = name, profile, small, example


def version(folder: Path) -> str:
    """Return the commit of a checkout, or its folder's name."""
    done = subprocess.run(["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"{folder} (no git)"


def loaded(path: Path, name: str, **stand_ins: Any) -> ModuleType:
    """Return a source file as module ``name``, with stand-ins for modules that it imports."""
    for other, module in stand_ins.items():
        sys.modules[other.replace("__", ".")] = module
    packages = name.split(".")[:-1]
    for i in range(1, len(packages) + 1):  # whose other modules are found where they are
        package = ".".join(packages[:i])
        sys.modules.setdefault(package, ModuleType(package)).__path__ = [str(path.parents[len(packages) - i])]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def function(path: Path, name: str, **known: Any) -> Any:
    """Return one function of a source file, whose module has imports that it doesn't need."""
    tree = ast.parse(path.read_text())
    node = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)
    exec(compile(ast.Module([node], []), str(path), "exec"), known)
    return known[name]


def flags(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in shlex.split(text.replace("\\\n", ""), comments=True):
        if word.startswith("--"):
            name = word[2:]
            found[name] = []
        else:
            found[name].append(word)
    return found


def megatron(folder: Path, text: str, case: Case) -> str:
    core = folder / "megatron" / "core"
    enums = loaded(core / "transformer" / "enums.py", "megatron.core.transformer.enums")
    state, ranks = ModuleType("megatron.core.parallel_state"), ModuleType("megatron.core._rank_utils")
    state.get_virtual_pipeline_model_parallel_world_size = lambda: None  # type: ignore[attr-defined]
    ranks.safe_get_rank = lambda: 1  # type: ignore[attr-defined]
    given = {"megatron__core__parallel_state": state, "megatron__core___rank_utils": ranks}
    sys.modules.setdefault("megatron.core", ModuleType("megatron.core")).parallel_state = state  # type: ignore[attr-defined]
    path = core / "transformer" / "pipeline_parallel_layer_layout.py"
    module = loaded(path, "megatron.core.transformer.pipeline_parallel_layer_layout", **given)
    found = flags(text)
    ranks_, layers = int(found["pipeline-model-parallel-size"][0]), int(found["num-layers"][0])
    layout = module.PipelineParallelLayerLayout.from_str(found["pipeline-model-parallel-layout"][0], ranks_)
    layout.validate_layer_layout(layers, None)
    built = [layer for row in layout.layout for stage in row for layer in stage]
    assert built.count(enums.LayerType.decoder) == layers
    return f"{ranks_} ranks x {layout.virtual_pipeline_model_parallel_size} chunks, {layers} layers"


def renamed(case: Case) -> nn.Module:
    """Return the small model as torchtitan has it: blocks in a ModuleList."""
    model = case.small()
    if not isinstance(model, nn.Sequential):
        return model
    found = nn.Module()
    children = dict(model.named_children())
    blocks = [part for name, part in children.items() if re.fullmatch(r"block\d+", name)]
    found.tok_embeddings, found.layers = children["embedding"], nn.ModuleList(blocks)
    found.norm, found.lm_head = children["norm"], children["head"]
    return found


def torchtitan(folder: Path, text: str, case: Case) -> str:
    path = folder / "torchtitan" / "distributed" / "pipeline_parallel.py"
    import copy

    lists = {"ModuleDict": nn.ModuleDict, "ModuleList": nn.ModuleList}
    split = function(path, "_split_module", nn=nn, copy=copy, **lists)
    parts = torchtitan_parts(folder, text)
    model = renamed(case)
    whole = dict(model.named_parameters())
    sizes = []
    for part in parts:
        chunk = split(model, part)
        sizes.append(sum(1 for _ in chunk.parameters()))
        assert sizes[-1], f"a stage of {part} has no parameters"
    assert sum(sizes) == len(whole), f"{sum(sizes)} parameters in stages, {len(whole)} in the model"
    return f"{len(parts)} stages, {len(whole)} parameters each in one"


def torchtitan_parts(folder: Path, text: str) -> list[list[str]]:
    """Return what torchtitan's own rule for tyro reads, or, without tyro, what the rule says."""
    given = flags(text)["parallelism.module_fqns_per_model_part"]
    try:
        import tyro
    except ImportError:
        return [part.split(",") for part in given]
    tree = ast.parse((folder / "torchtitan" / "config" / "manager.py").read_text())
    rules = next(x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == "register_tyro_rules")
    rules.decorator_list = []
    known: dict[str, Any] = {"tyro": tyro}
    exec(compile(ast.Module([rules], []), "manager.py", "exec"), known)
    registry = tyro.constructors.ConstructorRegistry()
    known["register_tyro_rules"](registry)
    configs = loaded(folder / "torchtitan" / "config" / "configs.py", "torchtitan.config.configs")
    words = [x for name, values in flags(text).items() if name.startswith("parallelism.") for x in
             (f"--{name.removeprefix('parallelism.')}", *values)]  # fmt: skip
    config = tyro.cli(configs.ParallelismConfig, args=words, registry=registry)
    found: list[list[str]] = config.module_fqns_per_model_part
    return found


def deepspeed(folder: Path, text: str, case: Case) -> str:
    pipe = folder / "deepspeed" / "runtime" / "pipe"
    comm = ModuleType("deepspeed.comm")
    for name in ("get_rank", "get_world_size", "new_group", "is_initialized", "broadcast", "all_reduce"):
        setattr(comm, name, getattr(dist, name))
    logger = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    stand_ins = {
        "deepspeed": {"comm": comm},
        "deepspeed.comm": {},
        "deepspeed.utils": {"logger": logger},
        "deepspeed.runtime.utils": {},
        "deepspeed.runtime.activation_checkpointing": {"checkpointing": SimpleNamespace(checkpoint=None)},
        "deepspeed.runtime.state_dict_factory": {"SDLoaderFactory": None},
        "deepspeed.accelerator": {"get_accelerator": lambda: SimpleNamespace(device_name=lambda _: "cpu")},
        "deepspeed.checkpoint": {},
        "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": None},
    }
    for name, attributes in stand_ins.items():
        module = comm if name == "deepspeed.comm" else ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        for key, value in attributes.items():
            setattr(module, key, value)
        sys.modules[name] = module
    sys.modules["deepspeed.runtime"] = runtime = ModuleType("deepspeed.runtime")
    runtime.__path__, runtime.utils = [], sys.modules["deepspeed.runtime.utils"]  # type: ignore[attr-defined]
    sys.modules["deepspeed.runtime"].activation_checkpointing = None  # type: ignore[attr-defined]
    sys.modules["deepspeed.activation_checkpointing"] = sys.modules["deepspeed.runtime.activation_checkpointing"]
    topology = loaded(pipe / "topology.py", "deepspeed.runtime.pipe.topology")
    source = loaded(pipe / "module.py", "deepspeed.runtime.pipe.module")
    sys.modules["deepspeed.pipe"] = ModuleType("deepspeed.pipe")
    sys.modules["deepspeed.pipe"].PipelineModule = source.PipelineModule  # type: ignore[attr-defined]
    exported: dict[str, Any] = {}
    exec(text, exported)
    if "PARTS" not in exported:  # it has no pipelines whose replicas share gradients
        return f"no pipeline, ZeRO-{exported['CONFIG']['zero_optimization']['stage']}"
    stages = len(exported["PARTS"]) - 1
    seen: list[int] = []
    for rank in range(stages):
        with World(rank, stages):
            model = case.small()
            topology_of = topology.PipeDataParallelTopology(stages, 1)
            made = exported["planned"](model, None, num_stages=None, topology=topology_of)
            own = {id(p) for p in made.parameters()}
            seen += [i for i, p in enumerate(model.parameters()) if id(p) in own]
    assert sorted(seen) == list(range(len(list(case.small().parameters()))))
    return f"{stages} stages, {len(seen)} parameters each in one"


class World:
    """A world of so many ranks, of which this process plays one."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __enter__(self) -> None:
        import os

        from torch.testing._internal.distributed.fake_pg import FakeStore

        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("fake", rank=self.rank, world_size=self.size, store=FakeStore())

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def torch_split(_: Path, text: str, case: Case) -> str:
    from torch.distributed.pipelining import SplitPoint, pipeline

    names = ast.literal_eval(next(x for x in text.splitlines() if x.startswith("SPLIT")).partition("= ")[2] or "set()")
    model = case.small()
    every = list(model.named_parameters(remove_duplicate=False))
    first = {id(x): name for name, x in reversed(every)}  # of what is shared, which torch may call by another name
    called = {name: first[id(x)] for name, x in every}
    given, keywords, _ = split_up(case.example)
    pipe = pipeline(model, given, keywords, dict.fromkeys(names, SplitPoint.BEGINNING))
    held = [[called[name] for name, _ in pipe.get_stage_module(s).named_parameters()] for s in range(pipe.num_stages)]
    assert len(held) == len(names) + 1, f"{len(held)} stages, not {len(names) + 1}"
    assert all(held), "a stage has no parameters"
    assert sorted(name for part in held for name in part) == sorted(first.values())
    pipe(*given, **keywords)
    return f"{len(held)} stages, {len(first)} parameters each in one"


ACCEPT: dict[str, Callable[[Path, str, Case], str]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "torch-split": torch_split,
}
