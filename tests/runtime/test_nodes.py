"""Nodes that don't have the same files: refused at the start by one sentence, on all ranks."""

from __future__ import annotations

import socket
import sys
import threading
from dataclasses import replace
from importlib import import_module
from unittest import mock
from zlib import crc32

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from cases import runtime as runtime_cases
from cases.nodes import on_nodes
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of
from torch import nn

from pipeplan.errors import BadInput, RunFailed
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.lowering.lowered_run import Position
from pipeplan.runtime.model.build.loading import chain_model, load_model
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes import agreement
from pipeplan.runtime.processes.agreement import Statement, difference, model_items, run_items, unreachable, writing_to
from pipeplan.runtime.processes.launch import is_under_torchrun, run_plan
from pipeplan.runtime.processes.messages import StorePeers
from pipeplan.runtime.training.state.checkpoint import FileSum, begin, file_of, finish, newest

MODEL = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
OPTIONS = RunOptions(steps=2, lr=0.01, timeout_s=SECONDS)


@pytest.fixture(scope="module")
def plan():
    return plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")


@pytest.fixture(scope="module")
def other_cut():
    return plan_of(chain_of(runtime_cases.healthy, 4), [(0, 2, (0,)), (2, 6, (1,))], weights="2bw")


def test_equal_nodes_train_as_one_machine_does(plan):
    report, nothing = on_nodes((plan, MODEL, OPTIONS), (plan, MODEL, OPTIONS))
    assert nothing is None
    assert report.losses == run_plan(plan, MODEL, OPTIONS).losses


def test_the_first_difference_ends_all_ranks_with_one_sentence(plan, other_cut):
    first = (plan, MODEL, OPTIONS)
    found = on_nodes(first, (plan, MODEL, replace(OPTIONS, lr=0.02)))
    words = "the ranks differ: the option lr is 0.01 for rank 0 on node0 and 0.02 for rank 1 on node1"
    assert found == [(2, f"{words}; every node needs the same")] * 2
    found = on_nodes(first, (other_cut, MODEL, replace(OPTIONS, seed=7)))
    assert found[0] == found[1]
    assert found[0][0] == 2
    assert found[0][1].startswith("the ranks differ: the plan's allocation is of checksum ")


OWN = """
from cases.runtime import vectors
from {helper} import layers
def build(batch):
    return layers(batch)
"""
LAYERS = "from cases.runtime import healthy as layers\n"


def node_folders(tmp_path, *codes):
    """A folder for each node, with a model whose layers come from a module of this code; None: without the model."""
    folders = [tmp_path / f"node{rank}" for rank in range(len(codes))]
    for folder, code in zip(folders, codes, strict=True):
        folder.mkdir()
        if code is not None:
            (folder / "own_model.py").write_text(OWN.format(helper="own_layers"))
            (folder / "own_layers.py").write_text(code)
    return folders


def test_other_code_of_the_model_is_refused_even_where_its_layers_look_the_same(plan, tmp_path):
    run = (plan, ModelSpec("own_model:build", "own_model:vectors"), OPTIONS)
    found = on_nodes(run, run, folders=node_folders(tmp_path, LAYERS, f"{LAYERS}# edited\n"))
    assert found[0] == found[1]
    assert found[0][0] == 2
    assert found[0][1].startswith("the ranks differ: the code of own_layers is of checksum ")
    assert found[0][1].endswith(" for rank 1 on node1; every node needs the same")


def test_the_model_s_own_file_is_compared_wherever_it_lies(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in ("installed_model", "another_package"):
        (folder / f"{name}.py").write_text("def build(batch): ...\n")
    monkeypatch.syspath_prepend(folder)
    import_module("another_package")
    assert list(agreement._code(ModelSpec("installed_model:build"))) == ["the code of installed_model"]
    for name in ("installed_model", "another_package"):
        monkeypatch.delitem(sys.modules, name)


def test_a_model_that_one_node_lacks_ends_the_others_at_once(plan, tmp_path):
    run = (plan, ModelSpec("own_model:build", "own_model:vectors"), OPTIONS)
    found = on_nodes(run, run, folders=node_folders(tmp_path, LAYERS, None))
    words = "own_model:build: ModuleNotFoundError: No module named 'own_model'"
    assert found == [(2, f"rank 1 on node1: {words}"), (2, words)]


def test_two_nodes_with_a_folder_each_are_refused_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "SHARED_S", 0.05)
    store, found = dist.HashStore(), {}

    def begin(rank, folder):
        with pytest.raises(BadInput) as caught, writing_to(folder, StorePeers(store, rank, 2, SECONDS)):
            pass
        found[rank] = str(caught.value)

    folders = [tmp_path / "here", tmp_path / "there"]
    threads = [threading.Thread(target=begin, args=each) for each in enumerate(folders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found[0] == found[1]
    assert found[0].startswith(f"checkpoint: {folders[0]} isn't the same folder for all ranks: what rank 0 on ")
    assert "rank 1 on " in found[0]
    assert list(folders[0].iterdir()) == []
    assert not folders[1].exists()


def test_a_checkpoint_that_lacks_the_file_of_a_rank_never_appears(tmp_path):
    """As in a folder that its ranks don't share; so nothing older is removed for it."""
    for step, ranks in ((1, 2), (2, 1)):
        partial = begin(tmp_path, step)
        for rank in range(ranks):
            (partial / file_of(rank)).write_bytes(b"abc")
        files = [FileSum(3, crc32(b"abc"))] * 2
        if ranks == 2:
            finish(partial, Position(step, step), "model", 0, files)
        else:
            with pytest.raises(RunFailed, match=r"^the file of rank 1 isn't there, so it has another folder: "):
                finish(partial, Position(step, step), "model", 0, files)
    assert newest(tmp_path).position.step == 1


def test_a_shared_folder_is_resumed_from_by_all_nodes(plan, tmp_path):
    first = (plan, MODEL, replace(OPTIONS, checkpoint=tmp_path))
    assert on_nodes(first, first)[0].losses
    again = (plan, MODEL, replace(OPTIONS, checkpoint=tmp_path, resume=True, steps=3))
    assert on_nodes(again, again)[0].steps == 1
    assert newest(tmp_path).position.step == 3


def said(items, rank=0, machine="one", address="10.0.0.1"):
    return Statement(f"node{rank}", address, machine, items)


def test_every_item_is_compared_and_code_only_where_both_have_it(plan):
    items = run_items(plan, MODEL, OPTIONS)
    assert difference([said(items), said(dict(items), 1), said(items, 2)]) is None
    for name in items:
        found = difference([said(items), said(items, 1), said(items | {name: "another"}, 2)])
        assert found.startswith(f"the ranks differ: {name} is {items[name]} for rank 0 on node0 and another for rank 2")
    one_more = items | {"layer 9": "there"}
    assert "layer 9 is missing for rank 0 on node0 and there for rank 1" in difference([said(items), said(one_more, 1)])
    assert difference([said(items), said(items | {"the code of helper": "there"}, 1)]) is None


def test_what_may_be_each_nodes_own_is_not_compared(plan, tmp_path):
    files = [{"save": tmp_path / f"{n}.pt", "checkpoint": tmp_path / str(n)} for n in (1, 2)]
    mine, other = (replace(OPTIONS, threads=n, timeout_s=n, **paths) for n, paths in enumerate(files, 1))
    assert run_items(plan, MODEL, mine) == run_items(plan, MODEL, other)
    for n in (1, 2):
        (tmp_path / f"start{n}").write_bytes(bytes([n]))
    one, two = (run_items(plan, MODEL, replace(mine, load=tmp_path / f"start{n}")) for n in (1, 2))
    assert [name for name in one if one[name] != two[name]] == ["the file of weights to load"]


def test_long_states_are_compared_by_pieces_and_folders_by_their_files(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "CHUNK", 4)
    monkeypatch.setattr(agreement, "SAMPLES", 8)
    folder = tmp_path / "state"
    folder.mkdir()
    path = folder / "model.safetensors"

    def found(load, content):
        path.write_bytes(content)
        return run_items(plan, MODEL, replace(OPTIONS, load=load))["the file of weights to load"]

    whole = bytes(range(200)) * 4
    for load in (path, folder):
        assert found(load, whole) == found(load, whole) != found(load, whole[:-1])
        assert found(load, whole) != found(load, b"x" + whole[1:]) != found(load, whole[:700] + b"x" + whole[701:])
    (folder / "notes.txt").write_text("of no matter")
    assert found(folder, whole) == run_items(plan, MODEL, replace(OPTIONS, load=folder))["the file of weights to load"]


def test_models_of_the_same_shapes_differ_by_what_their_layers_do():
    """And one that is built again doesn't, traced or not, whatever address its functions have."""
    for spec in (MODEL, ModelSpec("cases.traced:residual", "cases.traced:images")):
        assert model_items(spec, load_model(spec, 4, 0)) == model_items(spec, load_model(spec, 4, 1))
    x, spec = torch.zeros(4, 16), ModelSpec("small-cnn")

    def items(layer):
        layers = [nn.Linear(16, 16), layer, nn.Linear(16, 16)]
        return said(model_items(spec, chain_model(layers, x, runtime_cases.mean_square, runtime_cases.vectors)))

    assert difference([items(nn.ReLU()), items(nn.ReLU())]) is None
    found = difference([items(nn.ReLU()), items(nn.GELU())])
    assert found.startswith("the ranks differ: layer 1 of the model is relu1: ReLU() for rank 0 on node0 and ")


def test_host_names_that_stand_for_the_loopback_are_refused_where_nodes_are_several(monkeypatch):
    here, there = said({}), said({}, 1, "two", "127.0.1.1")
    assert unreachable([here, there]).startswith("rank 1's host name node1 stands for 127.0.1.1 there")
    assert "GLOO_SOCKET_IFNAME" in unreachable([here, there])
    assert unreachable([here, said({}, 1, "two", "")]) is None  # an interface is named
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=socket.gaierror))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    unknown = said({}, 1, "two", agreement._own_address())
    assert unreachable([here, unknown]).startswith("rank 1's host name node1 stands for no address; set GLOO_SOCKET_IF")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert agreement._own_address() == ""
    assert unreachable([said({}, 0, "two", "127.0.1.1"), there]) is None  # all on one machine


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the environment has WORLD_SIZE 2 but no MASTER_ADDR: torchrun "),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 processes, each of which would train by itself: "),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes"),
    ],
)
def test_processes_that_nothing_has_told_of_each_other_are_refused(environment, words, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=f"^{words}"):
        is_under_torchrun()


def test_variables_of_a_job_of_one_process_are_no_torchrun(monkeypatch):
    for name, value in {"MASTER_ADDR": "node1", "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not is_under_torchrun()
