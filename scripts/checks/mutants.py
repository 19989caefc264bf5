"""Which small faults are there in a module? What :mod:`mutation` puts into one, each at a time.

A fault is one replaced piece of source text, so a module keeps its lines: < for <=, + for -, min for max, and for or, a
number one larger, a condition negated, two arguments or results swapped, a statement left out, and so on. Docstrings,
type hints and their aliases, decorators, assertions, ``strict`` of zip, f-strings and what is raised are left alone:
nothing is computed there. So are the large constants of modules, and whether such a limit itself is still below it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LARGEST = 10  # constants of modules beyond it limit the effort of a search; one more changes nothing that is asked
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Div: ("/", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
UNREAD = ("__repr__", "__str__")


@dataclass(frozen=True)
class Mutant:
    """One fault: ``after`` in place of ``before``, lines of ``module`` with single spaces.

    ``start`` and ``stop`` are offsets in bytes of the text that ``new`` replaces. ``inside`` is the function's
    qualified name, ``block`` the line where the innermost block of a function around it begins, None outside functions.
    """

    module: str
    line: int
    inside: str
    block: int | None
    start: int
    stop: int
    new: str
    before: str = field(compare=False)
    after: str = field(compare=False)

    def applied(self, source: str) -> str:
        """Return the module's source with the fault in it."""
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.stop :]).decode()

    def compiles(self, source: str) -> bool:
        """Return whether the module with the fault in it is Python at all."""
        try:
            compile(self.applied(source), self.module, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return True


def mutants_of(source: str, module: str) -> list[Mutant]:
    """Return every fault for a module, also those few that Python itself refuses (see :meth:`Mutant.compiles`)."""
    return list(dict.fromkeys(_Finder(source, module).walk()))


def _inner_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    parts: list[ast.AST] = [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    blocks = [getattr(part, name, None) for part in parts for name in ("body", "orelse", "finalbody")]
    return [block for block in blocks if block]


def _for_types(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def _docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Finder:
    """Walks a module and yields its mutants."""

    def __init__(self, source: str, module: str) -> None:
        self.raw = source.encode()
        self.module = module
        self.tree = ast.parse(source)
        self.limits = {
            target.id
            for node in self.tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _beyond(node.value)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        self.unordered: set[ast.AST] = set()  # collections in which something is looked up
        self.line_starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def walk(self) -> Iterator[Mutant]:
        return self._statements(self.tree.body, (), None)

    def _statements(self, block: list[ast.stmt], inside: tuple[str, ...], line: int | None) -> Iterator[Mutant]:
        for statement in block:
            yield from self._statement(statement, inside, line)

    def _statement(self, node: ast.stmt, inside: tuple[str, ...], line: int | None) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef):
            if node.name not in UNREAD:
                body = node.body[1:] if _docstring(node.body[0]) and len(node.body) > 1 else node.body
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    yield from self._expression(default, (*inside, node.name), line)
                yield from self._statements(body, (*inside, node.name), body[0].lineno)
        elif isinstance(node, ast.ClassDef):
            yield from self._statements(node.body, (*inside, node.name), line)
        elif not (_docstring(node) or isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert)) or _for_types(node)):
            if line is None and isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
                return  # another name for a type
            for start, stop, new in self._left_out(node):
                yield self._mutant(start, stop, new, inside, line)
            if isinstance(node, ast.Raise):
                return
            inner = _inner_blocks(node)
            for block in inner:
                yield from self._statements(block, inside, None if line is None else block[0].lineno)
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr) and child is not getattr(node, "annotation", None):
                    limit = isinstance(node, (ast.Assign, ast.AnnAssign)) and line is None and not inside
                    yield from self._expression(child, inside, line, limit)
                elif isinstance(child, ast.withitem):
                    yield from self._expression(child.context_expr, inside, line)

    def _expression(
        self, root: ast.expr, inside: tuple[str, ...], line: int | None, limit: bool = False
    ) -> Iterator[Mutant]:
        left: list[ast.AST] = [root]
        while left:
            node = left.pop()
            if isinstance(node, ast.JoinedStr) or (limit and _beyond(node)):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":
                continue
            for start, stop, new in self._changes(node):
                yield self._mutant(start, stop, new, inside, line)
            typed = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) else None
            left += (x for x in ast.iter_child_nodes(node) if x is not typed)  # list[str]()

    def _left_out(self, node: ast.stmt) -> Iterator[tuple[int, int, str]]:
        """Statements that can be left out, loops that go on or stop, conditions the other way round."""
        if isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node):
            return
        if isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield, ast.YieldFrom))
        ):
            yield (*self._span(node), "pass")
        elif isinstance(node, ast.Continue):
            yield (*self._span(node), "break")
        elif isinstance(node, ast.Break):
            yield (*self._span(node), "continue")
        elif isinstance(node, (ast.If, ast.While)):
            yield (*self._span(node.test), f"not ({self._text(node.test)})")
        if isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
            old, new = COMPUTED[type(node.op)]
            yield from self._between(node.target, node.value, f"{old}=", f"{new}=")

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Yield (start, stop, new text) for each fault of one node itself."""
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if isinstance(op, (ast.In, ast.NotIn)):
                    self.unordered.add(right)
                if not (isinstance(op, ORDERED) and self.limits & {_name(left), _name(right)}):
                    yield from self._between(left, right, *COMPARED[type(op)])
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            yield from self._between(node.left, node.right, *COMPUTED[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, old, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield self._span(node)[0], self._span(node.operand)[0], "(" * self._opened(node)
        elif isinstance(node, ast.IfExp):
            yield (*self._span(node.test), f"not ({self._text(node.test)})")
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield (*self._span(test), f"not ({self._text(test)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            for value in (
                [not node.value] if isinstance(node.value, bool) else [node.value + 1, *[0] * (node.value == 1)]
            ):
                yield (*self._span(node), str(value))
        elif isinstance(node, ast.Call):
            yield from self._opposite(node.func)
            if _name(node.func) not in OPPOSITE:  # those don't care about the order
                yield from self._swapped([x for x in node.args if not isinstance(x, ast.Starred)])
        elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and node not in self.unordered:
            yield from self._swapped([x for x in node.elts if not isinstance(x, ast.Starred)])

    def _opened(self, node: ast.UnaryOp) -> int:
        return self.raw[self._span(node)[0] : self._span(node.operand)[0]].count(b"(")

    def _opposite(self, function: ast.expr) -> Iterator[tuple[int, int, str]]:
        name = _name(function)
        if name in OPPOSITE:
            stop = self._span(function)[1]
            yield stop - len(name), stop, OPPOSITE[name]

    def _swapped(self, parts: list[ast.expr]) -> Iterator[tuple[int, int, str]]:
        """The first two of several arguments or results in the other order, unless both are constants or alike."""
        if len(parts) < 2 or all(isinstance(x, ast.Constant) for x in parts[:2]):
            return
        (start, first_stop), (second_start, stop) = self._span(parts[0]), self._span(parts[1])
        first, second = self._text(parts[0]), self._text(parts[1])
        if first != second and not any(isinstance(x, ast.JoinedStr) for x in parts[:2]):
            yield start, stop, second + self.raw[first_stop:second_start].decode() + first

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[tuple[int, int, str]]:
        """The operator between two operands replaced."""
        start, stop = self._span(left)[1], self._span(right)[0]
        word = re.escape(old).replace(r"\ ", r"\s+")
        match = re.search(rf"\b{word}\b" if old[0].isalpha() else word, self.raw[start:stop].decode())
        if match is not None and self.raw[start:stop].isascii():
            yield start + match.start(), start + match.end(), new

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def _text(self, node: ast.expr) -> str:
        start, stop = self._span(node)
        return self.raw[start:stop].decode()

    def _mutant(self, start: int, stop: int, new: str, inside: tuple[str, ...], block: int | None) -> Mutant:
        first = self.raw.rfind(b"\n", 0, start) + 1
        last = self.raw.find(b"\n", stop)
        head, tail = self.raw[first:start].decode(), self.raw[stop:last].decode()
        before = " ".join((head + self.raw[start:stop].decode() + tail).split())
        after = " ".join((head + new + tail).split())
        line = self.raw.count(b"\n", 0, start) + 1
        return Mutant(self.module, line, ".".join(inside), block, start, stop, new, before, after)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _beyond(node: ast.AST) -> bool:
    """Whether an expression is a whole number larger than :data:`LARGEST`, such as 40 or 2 * 10**7."""
    return (_number(node) or 0) > LARGEST


def _number(node: ast.AST) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Pow)):
        left, right = _number(node.left), _number(node.right)
        if left is not None and right is not None:
            return left * right if isinstance(node.op, ast.Mult) else int(left**right)
    return None
