"""What groups of gloo take of hundreds of ranks: sockets, files, and words in the store."""

from __future__ import annotations

import json
import os
import resource

import pytest

torch = pytest.importorskip("torch")

from cases.forked import forked

from pipeplan.runtime.exchange.transport import FILES, LAZY, spare_sockets


def test_ranks_connect_to_those_they_exchange_with_alone():
    """Where all connect to all 64 ranks have 4,096 files; in rings and trees each has a few."""
    code = (
        "import json, os; from scripts.bench.starting import connected\n"
        "print(json.dumps([connected(n, True) for n in (16, 64)]), flush=True); os._exit(0)"
    )
    few, many = json.loads(forked(code).stdout)
    for world, ((operations, *_), _) in ((16, few), (64, many)):
        assert operations == world, "each has said where it is, and nobody has asked"
    for one, other in zip(few[1][:3], many[1][:3], strict=True):  # operations, bytes and files
        assert other < 8 * one, "four times the ranks, which are 16 times the pairs"
    assert many[1][2] < 64 * 20


def test_the_user_may_have_all_connect_at_once(monkeypatch):
    monkeypatch.setenv(LAZY, "0")
    spare_sockets()
    assert os.environ[LAZY] == "0"


def test_a_process_may_have_as_many_files_open_as_rank_0_hears_of_others():
    code = (
        "import resource as r; from pipeplan.runtime.exchange.transport import spare_sockets\n"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (256, hard)); spare_sockets()\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    done = forked(code)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(done.stdout) == (FILES if hard == resource.RLIM_INFINITY else min(FILES, hard))
