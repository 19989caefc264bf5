"""How does a table's row name what few need, so that nothing of it is imported before it is asked for?"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Late:
    """The function ``module:name`` of this package, whose module is imported when it is first called.

    What rows of tables reach so can be lifted out of the package with its row; tests/test_layers.py holds it to the law
    of imports as any other, and looks that it is there.
    """

    path: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it."""
        module, name = self.path.split(":")
        return getattr(import_module(f".{module}", __package__), name)(*arguments, **options)
