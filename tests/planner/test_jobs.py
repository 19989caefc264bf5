import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from cases.chains import random_chain

from pipeplan.deadline import Deadline
from pipeplan.errors import BadInput, PipeplanError
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.periodic.jobs import Task, in_order
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.compare import compare
from pipeplan.problem import Platform, Problem

PARENT = """
import os, signal, sys
from pipeplan.planner.periodic.jobs import Task
Task(signal.pause)
os.kill(os.getpid(), signal.SIGKILL)
"""


def what_is_loaded(number, problem):
    if number == 2:
        raise BadInput("two")
    print("said meanwhile")
    return number, problem, os.getpid(), "torch" in sys.modules


def small():
    import random

    chain = random_chain(random.Random(3), 6)
    need = 3 * int(chain.sums.weight_bytes[-1]) + sum(layer.output_bytes for layer in chain.layers)
    return Problem(chain, Platform.flat(3, need, 10**9), replicas=False, checkpointing="none")


def test_results_come_in_order_from_processes_that_load_little():
    problem = replace(small(), deadline=Deadline.within(1000))
    results = in_order(2, what_is_loaded, [(1, problem), (2, problem)])
    number, there, pid, torch_is_loaded = next(results)
    assert (number, there, torch_is_loaded) == (1, problem, False)
    assert 0 < there.deadline.remaining_s() < 1000
    assert pid != os.getpid()
    with pytest.raises(BadInput, match="two"):
        next(results)


def told_by_the_last(number, folder):
    told = os.path.join(folder, "told")
    if number == 0:
        os.mkfifo(told)
        with open(told) as there:
            return there.read()
    while number == 2 and not os.path.exists(told):
        time.sleep(0.01)
    if number == 2:
        with open(told, "w") as there:
            there.write("by 2")
    return str(number)


def test_one_that_takes_long_keeps_none_from_beginning(tmp_path):
    """The first waits for the third, which begins when the second is done."""
    assert list(in_order(2, told_by_the_last, [(i, str(tmp_path)) for i in range(4)])) == ["by 2", "1", "2", "3"]


def test_no_process_is_left():
    task = Task(signal.pause)
    task.end()
    assert task._process.returncode == -signal.SIGKILL
    parent = subprocess.run([sys.executable, "-c", PARENT], stderr=subprocess.PIPE, check=False)
    assert parent.returncode == -signal.SIGKILL  # and whoever else had its standard error is gone, too


def test_a_process_that_is_done_before_it_is_asked_ends_in_peace(capfd):
    task = Task(bytes, 9)
    assert task._process.wait() == 0
    assert task.result() == bytes(9)
    assert capfd.readouterr().err == ""


def half_an_answer():
    os.write(3, pickle.dumps((None, bytes(99)))[:50])  # the first that serve opens
    os._exit(1)


def test_a_process_that_cannot_answer_is_told_of(monkeypatch):
    with pytest.raises(PipeplanError, match="ended before its answer"):
        Task(half_an_answer).result()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    task = Task(len, bytes(10**6))  # more than a pipe holds
    with pytest.raises(PipeplanError, match="ended before its answer"):
        task.result()


def test_plans_and_tables_are_the_same():
    problem = small()
    one, two = (make_plan(problem, settings=Settings(jobs=jobs)).plan for jobs in (1, 2))
    assert one == two
    assert not one.allocation.data_parallel
    tables = [
        [
            [(cell.algorithm, cell.period_ns) for cell in row.cells]
            for row in compare(problem, (2, 3), (10**9,), ("contiguous",), clock=time.process_time, jobs=jobs)
        ]
        for jobs in (1, 2)
    ]
    assert tables[0] == tables[1]
