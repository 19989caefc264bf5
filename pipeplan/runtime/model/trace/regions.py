"""Which statements of a forward cannot be traced? As few as stand together become a function that is called in their
place, with the names that they read and those that others read behind them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

CALL, PART = "__eagerly__", "__part__"  # what a changed function calls, among its globals, and with what
HOOK = "register_hook"  # what sets a hook on a tensor
_LEAVING = (ast.Return, ast.Break, ast.Continue)
_NEVER = (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await)
_BLOCKS = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class Region:
    """The lines ``first`` to ``last`` of ``function``, as numbered in its file, and as many more as have to be."""

    function: FunctionType
    first: int
    last: int

    def overlaps(self, other: Region) -> bool:
        """Whether it has lines in common with ``other``."""
        (first, last), (begin, end) = self.ends(), other.ends()
        return first <= end and begin <= last

    def joined(self, other: Region) -> Region:
        """Return both as one."""
        return Region(self.function, min(self.first, other.first), max(self.last, other.last))

    def put(self, tree: ast.FunctionDef) -> None:
        """Let ``tree``, of the function, call its statements; ValueError where that is impossible."""
        block, start, stop, loop = self._place(tree)
        inside, locals_ = block[start:stop], _stored(tree) | {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)}
        parts = [part for statement in inside for part in ast.walk(statement)]
        if any(isinstance(x, _NEVER) for x in parts):
            raise ValueError("its statements cannot stand alone")
        for x in parts:
            if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id == "super" and not x.args:
                x.args = [ast.Name(name, ast.Load()) for name in ("__class__", tree.args.args[0].arg)]
        reads = _names(inside) & locals_
        ends = any(isinstance(x, ast.Return) for x in _own(inside))
        own = set(parts)
        outside = [x for x in ast.walk(tree) if isinstance(x, ast.Name) and (loop or x not in own)]
        makes = _stored(*inside) & {x.id for x in outside if isinstance(x.ctx, ast.Load)}
        block[start:stop] = _called(inside, sorted(reads), sorted(makes), ends)

    def until(self, names: set[str]) -> Region:
        """Return it with what is up to the next statement behind it that reads one of ``names``."""
        parts = (x for x in ast.walk(_tree(self.function)) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load))
        _, end = self.ends()
        return replace(self, last=min((x.lineno for x in parts if x.id in names and x.lineno > end), default=end))

    def since(self, names: set[str]) -> Region:
        """Return it with what is from the last statement before it on that sets one of ``names``."""
        parts = (x for x in ast.walk(_tree(self.function)) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
        return replace(
            self, first=max((x.lineno for x in parts if x.id in names and x.lineno < self.first), default=self.first)
        )

    def from_made(self) -> Region:
        """Return it with what makes the tensors that gradients are taken by, or hooks are set on, in it: from where
        they are set on, or, where they are given, read."""
        block, start, stop, _ = self._place(_tree(self.function))
        by: list[ast.AST] = []
        for x in (x for statement in block[start:stop] for x in ast.walk(statement) if isinstance(x, ast.Call)):
            called = ast.unparse(x.func).rpartition(".")[2]
            if called == "grad":
                by += [k.value for k in x.keywords if k.arg == "inputs"] + x.args[1:2]
            elif called == HOOK and isinstance(x.func, ast.Attribute):
                by.append(x.func.value)
        found = self
        for name in sorted(_names(by or block[start:stop])):
            longer = self.since({name})
            if by and longer == self:
                read = [x for x in ast.walk(_tree(self.function)) if isinstance(x, ast.Name) and x.id == name]
                longer = replace(self, first=min(x.lineno for x in read))
            found = min(found, longer, key=lambda x: x.first)
        return found

    def ends(self) -> tuple[int, int]:
        """Return the first and the last line of its statements."""
        block, start, stop, _ = self._place(_tree(self.function))
        return block[start].lineno, block[stop - 1].end_lineno or 0

    def _place(self, tree: ast.FunctionDef) -> tuple[list[ast.stmt], int, int, bool]:
        """Return the innermost block with the whole region, from where to where, and whether it is in a loop."""
        found: tuple[list[ast.stmt], int, int, bool] | None = None
        block, loop = tree.body, False
        while True:
            here = [i for i, x in enumerate(block) if x.lineno <= self.last and (x.end_lineno or 0) >= self.first]
            if not here:
                break
            start, stop = here[0], here[-1] + 1
            leaves = any(isinstance(x, _LEAVING) for x in _own(block[start:stop]))
            if block is tree.body:
                found = block, start, len(block) if leaves else stop, loop
            elif not leaves:
                found = block, start, stop, loop
            one = block[start]
            inner = [getattr(one, name, []) for name in _BLOCKS]
            inner = [x for x in inner if x and one.lineno < x[0].lineno <= self.first]  # what decides stands above
            inner = [x for x in inner if (x[-1].end_lineno or 0) >= self.last]
            if stop - start > 1 or not inner or isinstance(one, ast.FunctionDef | ast.ClassDef):
                break
            block, loop = inner[0], loop or isinstance(one, ast.For | ast.While)
        if found is None:
            raise ValueError("none of its statements are there")
        return found

    def held(self, module: nn.Module) -> tuple[list[nn.Module], bool]:
        """Return the modules of ``module``, itself if need be, that the region uses; and whether its own tensors."""
        block, start, stop, _ = self._place(_tree(self.function))
        found: list[nn.Module] = []
        own = False
        for value in _attributes(module, block[start:stop], _tree(self.function).args.args[0].arg, {self.function}):
            found += [value] if isinstance(value, nn.Module) else []
            own = own or isinstance(value, Tensor)
        return ([module] if module in found else list(dict.fromkeys(found))), own


def code_of(function: FunctionType, regions: Sequence[Region]) -> CodeType:
    """Return the code of ``function`` with ``regions``, apart from each other, called; ValueError if impossible."""
    tree = _tree(function)
    for region in sorted(regions, key=lambda x: -x.first):
        region.put(tree)
    return _compiled(tree, function)


def _tree(function: FunctionType) -> ast.FunctionDef:
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        raise ValueError("it isn't a plain function")
    return found


def forward_of(module: nn.Module) -> FunctionType | None:
    """Return the function that is the innermost of the forward of ``module``, below what decorates it."""
    found = inspect.unwrap(module.forward)
    found = getattr(found, "__func__", found)
    return found if isinstance(found, FunctionType) else None


def _attributes(module: nn.Module, statements: Sequence[ast.AST], name: str, seen: set[Any]) -> Iterator[Any]:
    """Yield what ``statements`` take of ``module``, called ``name`` there, and its methods that they call."""
    parts = [part for statement in statements for part in ast.walk(statement)]
    taken = [x for x in parts if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == name]
    if len(taken) < sum(isinstance(x, ast.Name) and x.id == name for x in parts):
        yield module
    for attribute in {x.attr for x in taken}:
        value = inspect.getattr_static(type(module), attribute, None)
        function = value.fget if isinstance(value, property) else value
        if not isinstance(function, FunctionType):
            yield getattr(module, attribute, None)
        elif function not in seen:
            seen.add(function)
            try:
                tree = _tree(function)
                yield from _attributes(module, tree.body, tree.args.args[0].arg, seen)
            except (OSError, ValueError, SyntaxError, IndexError):  # nobody knows what it does
                yield module


def _own(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the parts of ``statements`` but those of functions within, and loops' own ways out."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        loop = isinstance(statement, ast.For | ast.While)
        inner = _own(list(ast.iter_child_nodes(statement)))
        yield statement
        yield from (x for x in inner if not (loop and isinstance(x, ast.Break | ast.Continue)))


def _names(statements: Sequence[ast.AST]) -> set[str]:
    return {x.id for statement in statements for x in ast.walk(statement) if isinstance(x, ast.Name)}


def _stored(*statements: ast.AST) -> set[str]:
    parts = [x for statement in statements for x in ast.walk(statement)]
    return {x.id for x in parts if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load)}


def _called(inside: list[ast.stmt], reads: list[str], makes: list[str], ends: bool) -> list[ast.stmt]:
    """Return statements that make a function of ``inside`` and call it."""
    given = f"{{k: v for k, v in locals().items() if k in {reads!r}}}"
    text = [f"def {PART}(__given__):"]
    text += [f"    if {x!r} in __given__: {x} = __given__[{x!r}]" for x in reads]
    text += [f"    return {{k: v for k, v in locals().items() if k in {makes!r}}}"]
    if ends:
        text += [f"return {CALL}({PART}, {given})"]
    else:
        text += [f"__made__ = {CALL}({PART}, {given})"]
        text += [f"if {x!r} in __made__: {x} = __made__[{x!r}]" for x in makes]
    statements = ast.parse("\n".join(text)).body
    part = statements[0]
    assert isinstance(part, ast.FunctionDef), "the first line says so"
    own = {x for statement in inside for x in ast.walk(statement)}
    part.body[-1:] = inside if ends else [*inside, part.body[-1]]
    for statement in statements:
        for x in set(ast.walk(statement)) - own:
            if isinstance(x, ast.stmt | ast.expr):
                x.lineno = x.end_lineno = inside[0].lineno
    return statements


def _compiled(tree: ast.FunctionDef, function: FunctionType) -> CodeType:
    """Return the code of ``tree`` in the place of that of ``function``, with the same free names."""
    free = function.__code__.co_freevars
    outer = ast.parse(f"def __outer__({', '.join(free)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef), "that is what stands there"
    outer.body = [tree]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code: CodeType = next(x for x in compile(module, function.__code__.co_filename, "exec").co_consts if _is_code(x))
    code = next(x for x in code.co_consts if _is_code(x) and x.co_name == function.__name__)
    if code.co_freevars != free:
        raise ValueError("it needs names of functions around it")
    return code


def _is_code(value: Any) -> bool:
    return isinstance(value, CodeType)
