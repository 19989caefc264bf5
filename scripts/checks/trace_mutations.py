"""Plant faults in what traces, cuts and trains models, and say which the comparison with plain torch finds.

    python scripts/checks/trace_mutations.py [--only N,...] [--jobs 2]

Each fault is a change of a few words in one file (:data:`FAULTS`). A process of its own then traces the small models of
:data:`MODELS`, compares each, layer by layer and in three stages with messages between them, as ``profile`` and ``run``
do, and tells who refused the first model that was refused: the comparison, or an error before it. The exit code is 1
where a fault is noticed by nothing, or where an unchanged program refuses a model.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
ROOM = "pipeplan.runtime"
REFUSED = ("would not train as its own code says", "the layers of ")  # they differ; they don't run

FAULTS = (  # file, words, other words, what is wrong then
    ("facts", " and node not in changing:", ":", "what is written through a view is a constant"),
    ("facts", " and not _draws(node)", "", "each reader draws anew what was drawn once"),
    ("trace", "reach[home[base]] = max(reach[home[base]], index)", "pass", "writes part from what they write to"),
    ("trace", "reach[begin] = max(reach[begin], index)", "pass", "uses of one buffer part from its update"),
    ("trace", "groups[-1].nodes += waiting", "pass", "the last updates of buffers are forgotten"),
    ("trace", "            waiting.append(node)\n", "", "counts of batches are forgotten"),
    ("trace", "following += len(makes)", "following += 1", "values of one layer get the numbers of the next"),
    ("trace", "tuple(numbers[n] for n in needed)", "tuple(numbers[n] for n in needed[::-1])",
     "a layer reads its values in another order"),
    ("trace", "part.output(tuple(copies[n] for n in makes))", "part.output(tuple(copies[n] for n in makes[::-1]))",
     "a layer puts its values out in another order"),
    ("loaded", "{v: (self._data[v], self.specs[v])", "{v: (0, self.specs[v])", "one input stands for all"),
    ("trace", "seen.add(node)", "seen.add(node)\n        if node.op == 'placeholder' and index > 4:\n"
     "            continue", "late layers lack the network's inputs"),
    ("exported", "output = loss_in(module, output)", "output = 1.5 * loss_in(module, output)", "the loss is another"),
    ("trace", "makes = [n for n in dict", "group.nodes[-1:] = [] if len(group.nodes) > 3 else group.nodes[-1:]\n"
     "        makes = [n for n in dict", "the last operation of long layers is lost"),
    ("exported", "example_input = mapped(own_memory, example_input)", "", "one tensor given twice is one input"),
    ("exported", "module.train(training)", "module.eval()", "the trace is that of an evaluation"),
    ("exported", "        if users:\n", "        if False:\n", "readers of an old buffer see the new one"),
    ("exported", "seen.restored = refilling(output)\n        return tensors_in(output)",
     "seen.restored = refilling(output)\n        return tensors_in(output)[::-1]", "outputs change places"),
    ("adapted", "old.copy_(new.detach())", "old.copy_(old + new.detach())", "a buffer that is bound anew is lost"),
    ("noted", "for i, trains in self.changed.items():", "for i, trains in ():",
     "what runs as written changes its buffers unseen"),
    ("adapted", "            note()\n            return function(*arguments)",
     "            note()\n            return function(*(x.detach() for x in arguments))",
     "what recomputes by itself passes no gradient on"),
    ("adapted", 'kind.__module__.partition(".")[0] == "torch"', "True", "gradients of one's own are lost"),
    ("eager_calls", "part is not model and", "part is None and", "hooks of modules are lost"),
    ("eager_calls", "replaced(Tensor, HOOK, partial(no_more, HOOKED))", "replaced(Tensor, HOOK, lambda x, hook: None)",
     "hooks of tensors are lost"),
    ("eager_calls", "part.training = training", "part.training = False", "what runs as written does so in evaluation"),
    ("trace", "setattr(code.get_submodule(holder), name, found)",
     "setattr(code.get_submodule(holder), name, found if not isinstance(found, nn.Parameter) or found.dim() < 2 "
     "else nn.Parameter(found.detach().clone()))", "layers have copies of matrices"),
    ("structure", "for place in wanted] if named else tensors", "for place in wanted] if False else tensors",
     "keywords in another order are taken for each other"),
    ("traced", "return tuple(tensors), target", "return tuple(tensors[::-1]), target", "inputs change places"),
    ("pieces", "needed = (needed - set(makes)) | set(reads)", "needed = set(reads)", "what a piece passes on is lost"),
    ("pieces", "x.permute(spec.order) if spec.order else x for x", "x for x", "messages forget the order of memory"),
    ("pieces", "torch.split(message[: sum(sizes)], sizes)", "torch.split(message[: sum(sizes)], sizes[::-1])[::-1]",
     "the parts of a message change places"),
    ("trace", "trained = frozenset(number for n,", "trained = frozenset(number for n, number in numbers.items() if "
     "n in facts.trained and number % 2) or frozenset(number for n,", "gradients come to every other value alone"),
    ("loaded", "if v in self.trained)", "if v in self.trained)[:1]", "one gradient alone comes back"),
    ("network", "structure(values[:-1])", "structure(values[:-1][::-1])", "the loss gets its outputs in another order"),
    ("split_stage", "            part.run()\n", "            part.let_go()\n",
     "the weights' part of a backward is left out"),
    ("split_stage", "part.groups += later_part(list(held.begun().values()))", "held.begun()",
     "layers into which no gradient goes don't train"),
    ("stage", "known[value] = known[value] + gradient if value in known else gradient", "known[value] = gradient",
     "of the gradients of a value in several pieces one counts"),
    ("update", "ties = [tie for tie in ties if len(tie.places) > 1]", "ties = []", "copies of a weight aren't summed"),
)  # fmt: skip


def _models() -> Iterator[tuple[str, Callable[[int], Any], Callable[[int, int], Any]]]:
    import torch
    from cases import traced
    from torch import nn
    from torch.nn import functional

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.round()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient

    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.inside = nn.Dropout(0.5), nn.Linear(4, 4)
            self.register_buffer("seen", torch.ones(()))

        def forward(self, x: Any) -> Any:
            self.seen += 1
            return self.drop(self.inside(x)) / self.seen if x.sum() < 1e9 else x

    class Own(nn.Module):
        """A gradient of its own, hooks of both kinds, what cannot be traced, and noise that two layers read."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
            self.branch, self.wide, self.hooked = Scripted(), nn.Linear(4, 64), nn.Linear(4, 4)
            self.back = nn.Linear(64, 4)
            self.register_buffer("count", torch.zeros(()))
            self.middle.register_full_backward_pre_hook(lambda _, gradients: tuple(3 * x for x in gradients))

        def forward(self, x: Any) -> Any:
            noise = torch.randn(4)
            x = Straight.apply(4 * self.first(x) * noise)
            x = self.middle(self.branch(x)) * noise
            y = self.hooked(torch.tanh(x))
            if y.requires_grad:
                y.register_hook(lambda gradient: 2 * gradient)
            y = self.last(self.back(self.wide(y))) * self.branch.seen
            self.count += 1
            return y

    def own(batch: int) -> Any:
        torch.manual_seed(8)
        return Own(), torch.zeros(batch, 4), functional.mse_loss

    yield "own", own, traced.vectors
    for build, data in traced.DATA.items():
        yield build.__name__, build, data


def _compare(build: Callable[[int], Any], data: Callable[[int, int], Any]) -> None:
    """Compare a model as a profile does, and in three stages on its own data as a run does."""
    import torch
    from cases.traced import in_three

    from pipeplan.runtime.engine.comparison import compare_stages
    from pipeplan.runtime.model.contract import contract, sample_of
    from pipeplan.runtime.model.network import own_loss
    from pipeplan.runtime.model.structure import tensors_in
    from pipeplan.runtime.model.trace.author import Author
    from pipeplan.runtime.model.trace.compared import apart, compare
    from pipeplan.runtime.model.trace.trace import trace_module
    from pipeplan.runtime.model.trace.traced import traced_model, with_state_of

    for staged in (False, True):
        built = contract(build(4))
        torch.manual_seed(0)
        module, loss = built.layers, built.loss or own_loss
        given = data(0, 0)
        x, target = sample_of(given, built.loss)
        author = Author.of(module, x, built.loss is None)
        if not staged:
            network = trace_module(module, built.example, loss_alone=built.loss is None)
            with_state_of(module, network)
            author = Author.of(module, built.example, built.loss is None)
            compare(author, apart(network, loss), loss, network.inputs, target)
            continue
        model = traced_model(module, built.example, built.loss, data, torch.device("cpu"))
        inputs = model.data.enter(0, given)[0]
        for schedule in ("1f1b", "zb1p"):
            compare_stages(author, in_three(model, schedule), model, torch.device("cpu"), tensors_in(x), inputs, target)


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with some of its words replaced."""

    def __init__(self, name: str, words: str, others: str) -> None:
        (file,) = ROOT.joinpath(*ROOM.split(".")).rglob(f"{name}.py")
        self.name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        self.words, self.others = words, others

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        file = ROOT.joinpath(*self.name.split(".")).with_suffix(".py")
        source = file.read_text()
        assert self.words in source, f"{file} has no {self.words!r}"
        module.__file__ = str(file)
        exec(compile(source.replace(self.words, self.others), str(file), "exec"), module.__dict__)


def _outcome(fault: tuple[str, str, str, str] | None, pipe: Any) -> None:
    """Send who refused which model first, and how; nothing where all passed."""
    if fault is not None:
        sys.meta_path.insert(0, _Changed(*fault[:3]))
    said = ""
    for name, build, data in _models():
        try:
            _compare(build, data)
        except AssertionError as error:
            said = f"{name}: {error!r}"
        except Exception as error:
            said = f"{name}: {str(error).splitlines()[0] if str(error) else error!r}"
        if said:
            break
    pipe.send(said)


def tried(fault: tuple[str, str, str, str] | None) -> str:
    """Return what a process says that has the fault."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_outcome, args=(fault, theirs))
    process.start()
    theirs.close()
    try:
        said = str(ours.recv())
    except EOFError:
        said = "died"
    process.join()
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of faults")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    chosen = range(len(FAULTS)) if arguments.only is None else [int(x) for x in arguments.only.split(",")]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        plain, *found = pool.map(tried, [None, *(FAULTS[i] for i in chosen)])
    if plain:
        print(f"without a fault: {plain}")
    compared = before = 0
    for i, said in zip(chosen, found, strict=True):
        found_out = any(words in said for words in REFUSED)
        compared += found_out
        before += bool(said) and not found_out
        how = "compared" if found_out else "an error" if said else "NOTHING"
        print(f"{i:2d} {FAULTS[i][0]:<14}{FAULTS[i][3]:<55}{how}: {said[:150]}")
    print(f"{len(found)} faults: {compared} refused by the comparison, {before} by an error before it")
    return int(bool(plain) or compared + before < len(found))


if __name__ == "__main__":
    sys.exit(main())
