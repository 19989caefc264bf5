"""What does one rank of a tensor-parallel group have of a transformers model? What the model's own plan gives it.

``base_model_tp_plan`` of its config says of which matrices ranks have columns or rows, and of experts parts of each
one's. What reads several of them takes its input once for all. Embedding and head are parted by the vocabulary and the
loss is that of a rank's columns, as in Megatron-LM and torchtitan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from ....errors import BadInput
from ....zoo.text.rank_part import Group

COLUMNS = ("colwise", "packed_colwise")
SUMMED = "moe_tp_experts"  # what a module puts out, whose weights are said one by one
WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
HEADS = ("num_attention_heads", "num_key_value_heads")


class Role(NamedTuple):
    """What a module does beside its own forward: take a part of its input along the sequence, gather its input for
    products with columns, or sum what products with rows put out."""

    scatters: bool = False
    reads: bool = False
    sums: bool = False


def part_of(model: Any, group: Group) -> None:
    """Leave of ``model`` what one rank of ``group`` has; BadInput where its plan, or a size, can't be parted."""
    text = model.config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise BadInput(f"tensor: {type(model).__name__} has no plan in transformers (base_model_tp_plan)")
    if group.sequence_parallel and SUMMED in plan.values():
        raise BadInput("sequence_parallel: experts aren't parted along the sequence here; leave it out")
    for name in HEADS:
        group.share(getattr(text, name, None) or group.ranks, name.removeprefix("num_").replace("_", " "))
    roles = dict[nn.Module, Role]()
    base = getattr(model, model.base_model_prefix, model)
    table = model.get_input_embeddings()
    for path, style in _named(base, plan):
        place, _, name = path.rpartition(".")
        parent, part = base.get_submodule(place), getattr(base.get_submodule(place), name)
        if style in WHOLE or part is table:
            continue
        if style not in (*COLUMNS, "rowwise", SUMMED):
            raise BadInput(f"tensor: the plan of {type(model).__name__} has {path} {style}, which isn't known here")
        columns = style in COLUMNS
        if isinstance(part, nn.Parameter):  # of experts: (experts, rows, columns)
            _shrink(parent, name, group.share(part.shape[-2 if columns else -1], f"of {name}"), -2 if columns else -1)
        elif style == SUMMED:
            roles[part] = Role(reads=True, sums=True)
        else:
            size = "out_features" if columns else "in_features"
            setattr(part, size, group.share(getattr(part, size), f"of {name}"))
            _shrink(part, "weight", getattr(part, size), 0 if columns else 1)
            if columns and part.bias is not None:
                _shrink(part, "bias", part.out_features, 0)
            roles[parent if columns else part] = Role(reads=columns, sums=not columns)
    _part_vocabulary(model, text, table, group, roles)
    if group.sequence_parallel:
        blocks = base.get_submodule(next(x for x in plan if ".*" in x).partition(".*")[0])
        roles[blocks[0]] = Role(scatters=True)
    for module, role in roles.items():
        kind: Any = type(module)
        module.__class__ = _parted(kind, group if module is not table else Group(group.ranks), role)


def _part_vocabulary(model: Any, text: Any, table: Any, group: Group, roles: dict[nn.Module, Role]) -> None:
    """Part embedding and head; whether they are one weight stays as it was."""
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    text.vocab_size = table.num_embeddings = group.rows(table.num_embeddings)
    if hasattr(model, "vocab_size"):  # by which some models count their logits
        model.vocab_size = text.vocab_size
    _shrink(table, "weight", table.num_embeddings, 0)
    roles[table] = Role(sums=True)
    if head is None:
        return
    head.out_features = table.num_embeddings
    _shrink(head, "weight", head.out_features, 0)
    if tied:
        head.weight = table.weight
    roles[head] = Role(reads=True)


def _named(base: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield every module and every parameter that the plan names, with how it is parted."""
    rules = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()]
    paths = [*(x for x, _ in base.named_modules()), *(x for x, _ in base.named_parameters())]
    for path in paths:
        style = next((style for rule, style in rules if rule.fullmatch(path)), None)
        if style is not None:
            yield path, style


def _shrink(module: Any, name: str, length: int, axis: int) -> None:
    """Leave so much of a parameter along ``axis``."""
    whole = getattr(module, name)
    shape = list(whole.shape)
    shape[axis] = length
    setattr(module, name, nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad))


@cache
def _parted(kind: Any, group: Group, role: Role) -> type:
    """Return the class of modules of a ``kind`` that exchange what their ``role`` says; one class for like modules, so
    that like blocks stay alike."""

    class Part(kind):  # type: ignore[misc]  # whatever kind
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if role.scatters or role.reads:
                args, kwargs = _with_input(args, kwargs, group, role.scatters)
            out = super().forward(*args, **kwargs)
            if not role.sums:
                return out
            return group.summed(out) if isinstance(out, Tensor) else (group.summed(out[0]), *out[1:])

    Part.__name__, Part.__qualname__, Part.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Part


def _with_input(args: Any, kwargs: Any, group: Group, scatters: bool) -> tuple[Any, Any]:
    """Return arguments whose first, or hidden states, are a part along the sequence, or what products read."""
    x = args[0] if args else kwargs["hidden_states"]
    x = x.narrow(1, 0, x.shape[1] // group.ranks).contiguous() if scatters else group.given(x)
    return (x, *args[1:]) if args else args, kwargs if args else {**kwargs, "hidden_states": x}
