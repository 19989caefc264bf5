"""Values keep their types while tensors in them change, and are told apart by place."""

import gc
import weakref
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from torch.utils import _pytree as pytree

from pipeplan.runtime.model.network import loss_value
from pipeplan.runtime.model.structure import closed_leaf, mapped, places_in, refilling, tensors_in

Named = namedtuple("Named", ["scores", "hidden"])


@dataclass(frozen=True)
class Plain:
    scores: object
    more: object = None
    name: str = field(default="plain", init=False)


class Output(OrderedDict):
    """As transformers' outputs: a dict with attributes, which torch knows."""

    def __getattr__(self, name):
        return self[name]


pytree.register_pytree_node(Output, lambda x: (list(x.values()), list(x)), lambda v, k: Output(zip(k, v, strict=True)))


class Encoding(UserDict):
    def __init__(self, data, note):
        super().__init__(data)
        self.note = note


class Rows(list):
    pass


class Pair(tuple):
    pass


class Cache:
    def __init__(self, tensor):
        self.layers = [Named(tensor, None)]


ONE, TWO = torch.ones(2), torch.zeros(3, dtype=torch.int64)
VALUES = [
    ONE, [ONE, (TWO, None)], Named(ONE, {"a": TWO, "b": "text"}), Plain(ONE, Plain(TWO)),
    Output(scores=ONE, loss=None, hidden=TWO), Encoding({"ids": TWO, "more": [ONE]}, "kept"), Rows([ONE, TWO]),
    Pair((ONE, TWO)),
]  # fmt: skip


def types(value):
    if isinstance(value, torch.Tensor | str | None):
        return type(value)
    if isinstance(value, Plain):
        inside = {name: getattr(value, name) for name in ("scores", "more", "name")}
    elif hasattr(value, "keys"):
        inside = dict(value)
    else:
        inside = dict(enumerate(value))
    return type(value), {key: types(x) for key, x in inside.items()}


@pytest.mark.parametrize("value", VALUES, ids=lambda x: type(x).__name__)
def test_what_is_made_of_other_tensors_is_of_the_same_types(value):
    doubled = mapped(lambda x: x * 2, value)
    assert types(doubled) == types(value)
    assert all(torch.equal(a * 2, b) for a, b in zip(tensors_in(value), tensors_in(doubled), strict=True))
    assert types(refilling(value)(tensors_in(doubled))) == types(value)
    widened = []
    loss_value(lambda output, target: widened.append(output), mapped(lambda x: x.to(torch.bfloat16), value), None)
    assert types(widened[0]) == types(value)
    assert {x.dtype for x in tensors_in(widened[0])} == {torch.float32}


@pytest.fixture
def no_collections():
    """Garbage in circles stays, as between the rare collections of a run."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("use", [tensors_in, places_in, lambda value: mapped(torch.clone, value)])
def test_a_value_that_was_looked_through_is_freed_at_once(use):
    for make in (Plain, lambda x: (x, None), lambda x: {"x": [x]}, lambda x: Named(x, 1), lambda x: Output(x=x)):
        tensor = torch.ones(3)
        gone = weakref.ref(tensor)
        use(make(tensor))
        del tensor
        assert gone() is None


@pytest.mark.usefixtures("no_collections")
def test_what_is_remembered_of_a_value_keeps_no_tensor():
    for make in (Plain, lambda x: Encoding({"x": x}, ""), lambda x: Rows([x]), lambda x: Named(x, {"y": Pair((x,))})):
        tensor = torch.ones(3)
        gone, again = weakref.ref(tensor), refilling(make(tensor))
        del tensor
        assert gone() is None
        count = len(tensors_in(make(ONE)))
        assert tensors_in(again([TWO] * count))[0] is TWO


def test_places_and_hidden_tensors():
    assert places_in({"ids": ONE, "more": Named(TWO, [ONE])}) == ["ids", "more_scores", "more_hidden_0"]
    hidden = Cache(ONE)
    assert closed_leaf({"a": ONE, "past": hidden}) is hidden
    assert closed_leaf({"a": ONE, "b": 3, "c": None, "d": object()}) is None
