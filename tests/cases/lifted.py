"""A copy of the package is left without some features: without their files, and without the rows that name these."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LISTS = ("choices", "targets", "best_order")  # modules that list the names of rows that others have


def lift(package: Path, words: list[str]) -> None:
    """Delete the files among ``words``, which have a /, and every row that says one of them or has one of the other
    words for its name; then the names of these rows where they are listed."""
    paths = {package / word for word in words if "/" in word}
    files = [x for path in paths for x in ([path] if path.is_file() else path.rglob("*.py"))]
    rows = Rows({dotted(x, package) for x in files}, {word for word in words if "/" not in word})
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    ends = "|".join(sorted({x.rpartition(".")[2] for x in rows.gone} | rows.names))
    about = re.compile(rf"""(?:["'.:]|, )(?:{ends})\b""")
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    modules = {path: ast.parse(x) for path, x in texts.items() if about.search(x) or path.stem in LISTS}
    for _ in range(2):  # the names of rows are known behind the first time
        for path, module in modules.items():
            before, rows.parts = rows.taken, path.relative_to(package).with_suffix("").parts
            rows.visit(module)
            if rows.taken > before:
                path.write_text(ast.unparse(module))


def dotted(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


class Rows(ast.NodeTransformer):
    """Takes what says modules that are ``gone``, or has one of the ``names``, out of the tables of a module, whose path
    are ``parts``: rows of dicts and tuples, names for what is there late, types, and functions of commands."""

    def __init__(self, gone: set[str], names: set[str]) -> None:
        self.gone, self.names = gone, names
        self.listed: set[str] = set()  # names of rows that were taken
        self.commands: set[str] = set()  # module:function, of those of commands
        self.parts: tuple[str, ...] = ()
        self.taken = 0

    def says(self, node: ast.AST) -> bool:
        """Whether it has the path of what is gone in it, or the end of it, as in ``Late("partition.piper:piper")``."""
        texts = (x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str))
        paths = {x.split(":")[0] for x in texts if re.fullmatch(r"[\w.]+[.:]\w+", x)}
        return any(f".{module}".endswith(f".{path}") for module in self.gone for path in paths)

    def has_name(self, node: ast.AST | None) -> bool:
        """Whether it is a name, in quotes or not."""
        own = self.names | (self.listed if self.parts[-1] in LISTS else set())
        return getattr(node, "value" if isinstance(node, ast.Constant) else "id", None) in own

    def without(self, nodes: list[Any], goes: Callable[[Any], bool]) -> list[Any]:
        there = [node for node in nodes if not goes(node)]
        self.taken += len(nodes) - len(there)
        return there

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        def goes(pair: tuple[ast.expr | None, ast.expr]) -> bool:
            key, value = pair
            if not (self.has_name(key) or self.has_name(value) or self.says(value)):
                return False
            self.listed |= {key.value} if isinstance(key, ast.Constant) else set()
            self.commands |= {x.value for x in ast.walk(value) if isinstance(x, ast.Constant)}
            return True

        pairs = self.without(list(zip(node.keys, node.values, strict=True)), goes)
        node.keys, node.values = [key for key, _ in pairs], [self.visit(value) for _, value in pairs]
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        def goes(x: ast.expr) -> bool:
            return self.has_name(x) or (not isinstance(x, ast.Tuple) and self.says(x))

        node.elts = [self.visit(x) for x in self.without(node.elts, goes)]
        return node

    def visit_Module(self, node: Any) -> Any:
        def goes(x: ast.stmt) -> bool:
            if isinstance(x, ast.FunctionDef):
                return f"{self.parts[-1]}:{x.name}" in self.commands
            if isinstance(x, ast.ImportFrom) and isinstance(node, ast.If):  # for types alone
                return ".".join((*self.parts[: len(self.parts) - x.level], x.module or "")) in self.gone
            several = isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Tuple)
            value = x.value if isinstance(x, ast.Assign | ast.AnnAssign) else None
            return (several or isinstance(value, ast.Call)) and value is not None and self.says(value)

        node.body = [self.visit(x) for x in self.without(node.body, goes)] or [ast.Pass()]
        if isinstance(node, ast.If):
            node.orelse = [self.visit(x) for x in node.orelse]
        return node

    visit_If = visit_Module

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Leave what is done as it is: rows are outside."""
        return node


def dangling(package: Path) -> Iterator[tuple[str, str]]:
    """Yield what modules of a package import of it, or name in a row, that isn't there."""
    modules = {path: dotted(path, package) for path in package.rglob("*.py")}
    for path, own in modules.items():
        text, parts = path.read_text(), path.relative_to(package).parts
        imported = re.findall(r"^ *from (\.+)([\w.]*) import ", text, re.MULTILINE)
        names = [".".join((*parts[: len(parts) - len(dots)], *filter(None, [name]))) for dots, name in imported]
        names += re.findall(r"""Late\(["']([\w.]+):""", text)
        yield from ((own, name) for name in names if name and name not in modules.values())
