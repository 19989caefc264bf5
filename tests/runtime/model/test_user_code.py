"""The user's own code, where it fails: one sentence with its file and line, and nothing imported that is not typed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Command

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of

from pipeplan.check.bounds import any_bound
from pipeplan.errors import BadInput, CodeFailed
from pipeplan.files.plans import plan_text
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.runtime.model.build.spec import ModelSpec, find
from pipeplan.runtime.model.user_code import is_installed, place_of, user_code
from pipeplan.runtime.processes.own_processes import our_imports_alone

FAILING = """
import sys
import torch
from torch import nn

class Forward(nn.Linear):
    def forward(self, x):
        raise ValueError("no way\\non")

class Leaving(nn.Linear):
    def forward(self, x):
        sys.exit("enough")

class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError

class Backward(nn.Linear):
    def forward(self, x):
        return NoWayBack.apply(super().forward(x))

def model(layer, loss=nn.functional.mse_loss):
    return [nn.Linear(4, 4), layer(4, 4)], torch.zeros(2, 4), loss

def forward(batch):
    return model(Forward)

def leaving(batch):
    return model(Leaving)

def backward(batch):
    return model(Backward)

def whole(batch):
    layers, x, loss = model(Leaving)
    return nn.ModuleDict({"x": layers[1]})["x"], x, loss

def build(batch):
    return [nn.Linear(4, 4)], torch.zeros(2, 4), undefined

def exiting(batch):
    sys.exit(0)

def bad_loss(batch):
    return model(nn.Linear, lambda output, target: sys.exit())

def healthy(batch):
    return model(nn.Linear)

def data(index, seed):
    raise KeyError(index)

def numbers(index, seed):
    return torch.zeros(2, 4), torch.zeros(2, 4)
"""
LINES = {text.strip(): number for number, text in enumerate(FAILING.splitlines(), 1)}
CODE = [
    (["forward"], r'layers[1] (forward1) failed on an input of shape (2, 4), torch.float32: ValueError: no way',
     'raise ValueError("no way\\non")'),
    (["leaving"], "failed on an input of shape (2, 4), torch.float32: it ended the program by sys.exit(enough)",
     'sys.exit("enough")'),
    (["whole"], "Leaving: it ended the program by sys.exit(enough)", 'sys.exit("enough")'),
    (["backward"], "the backward of layers[1] (backward1): ArithmeticError", "raise ArithmeticError"),
    (["build"], "build: NameError: name 'undefined' is not defined",
     "return [nn.Linear(4, 4)], torch.zeros(2, 4), undefined"),
    (["exiting"], "build: it ended the program by sys.exit(0)", "sys.exit(0)"),
    (["exiting", "--estimate", "v100"], "build: it ended the program by sys.exit(0)", "sys.exit(0)"),
    (["bad_loss", "--data", "failing:numbers"], "loss failed on (2, 4) against (2, 4): it ended the program by sys",
     "return model(nn.Linear, lambda output, target: sys.exit())"),
    (["healthy", "--data", "failing:data"], "data: KeyError: 0", "raise KeyError(index)"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with modules of its own."""
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "needs.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("failing", "broken", "leaves", "needs", "evil"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize(("arguments", "words", "line"), CODE, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_what_fails_in_code_is_told_with_its_line(
    arguments: list[str], words: str, line: str, folder: Path, pipeplan: Command
) -> None:
    model, *rest = arguments
    code, out, err = pipeplan("profile", f"failing:{model}", "--microbatch", "2", "--steps", "1", "-q", *rest)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1
    assert err.endswith(f"(failing.py:{LINES[line]})\n")
    sys.modules.pop("failing")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("broken", 1, r"broken:build: SyntaxError: .* (broken.py, line 1)"),
        ("leaves", 1, "leaves:build: it ended the program by sys.exit(0) (leaves.py:2)"),
        ("needs", 2, "needs:build: ModuleNotFoundError: No module named 'no_such_library' (needs.py:1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told(
    name: str, code: int, words: str, folder: Path, pipeplan: Command
) -> None:
    found, out, err = pipeplan("profile", f"{name}:build")
    assert (found, out) == (code, "")
    first, _, last = words.partition(".*")
    assert first in err
    assert err.rstrip().endswith(last)


def test_the_traceback_is_there_for_those_who_ask(folder: Path, pipeplan: Command) -> None:
    code, _, err = pipeplan("profile", "failing:build", "-q", "--debug")
    assert code == 1
    assert err.startswith("Traceback")
    assert 'failing.py", line' in err
    assert err.splitlines()[-1].startswith("error: build: NameError")


def test_what_is_worded_already_and_ctrl_c_stay_as_they_are() -> None:
    for error in (BadInput("words"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, user_code("here"):
            raise error
        assert caught.value is error
    words = r"^here: it ended the program by sys.exit\(\) \(.*test_user_code.py:\d+\)$"
    with pytest.raises(CodeFailed, match=words), user_code("here"):
        sys.exit()


# --- what is imported -----------------------------------------------------------------------------------------------

EVIL = "from pathlib import Path\nPath(__file__).with_name('left').touch()\n" + FAILING


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("evil:healthy", ()), ("evil:healthy", ("--dry-run",)), ("evil:healthy", ("--data", "cases.runtime:vectors")),
        ("evil:healthy", ("--epochs", "1", "--epoch-length", "8", "--dry-run")), ("evil:healthy", ("--evaluate",)),
        ("zoo:evil:healthy", ()), ("zoo:evil:healthy", ("--data", "cases.runtime:vectors")),
        ("evil", ("--data", "cases.runtime:vectors")),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)  # fmt: skip
def test_a_plan_runs_no_code_by_its_name(
    name: str, options: tuple[str, ...], plan: Plan, folder: Path, pipeplan: Command
) -> None:
    """What importing it would leave behind is not there, and nothing was started for it."""
    (folder / "evil.py").write_text(EVIL)
    chain = replace(plan.chain, name=name)
    bound = any_bound(Problem(chain, plan.platform, plan.policy))
    (folder / "plan.json").write_text(plan_text(replace(plan, chain=chain, lower_bounds=(bound,))))
    code, out, err = pipeplan("run", "plan.json", *options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert f"named '{name.removeprefix('zoo:')}'" in err
    for command in ("check", "show", "simulate"):
        assert pipeplan(command, "plan.json")[0] == 0
    assert "evil" not in sys.modules
    assert not (folder / "left").exists()


def test_what_is_typed_is_imported_from_the_working_folder_which_then_shadows_nothing(folder: Path) -> None:
    (folder / "evil.py").write_text(EVIL)
    (folder / "colorsys.py").write_text("raise SystemExit")
    sys.modules.pop("colorsys", None)
    assert find("evil:healthy")(1)[0]
    assert (folder / "left").exists()
    import colorsys

    assert "SystemExit" not in Path(str(colorsys.__file__)).read_text()
    assert sys.path[-1] == str(folder)
    assert sys.path.count(str(folder)) == 1
    for text in ("evil", "evil:", ":healthy"):
        with pytest.raises(BadInput, match="is not of the form module:function"):
            find(text)
    assert ModelSpec("zoo:evil:healthy").of_zoo
    assert not ModelSpec("evil:healthy").of_zoo


def test_processes_that_are_started_look_into_the_working_folder_only_if_we_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "colorsys.py").write_text("print('shadowed')\n")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    command = [sys.executable, "-c", "import colorsys"]

    def printed() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout

    assert printed() == "shadowed\n"
    with our_imports_alone():
        assert printed() == ""
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.syspath_prepend(str(folder))
    with our_imports_alone():
        assert printed() == "shadowed\n"


def test_torch_is_no_users_code_wherever_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__file__=str(tmp_path / "torch" / "__init__.py")))
    assert place_of(str(tmp_path / "torch" / "nn" / "linear.py"), 3) is None
    assert place_of(str(tmp_path / "timm" / "layers.py"), 3) == "timm/layers.py:3"
    assert is_installed(str(tmp_path / "timm" / "layers.py"))
