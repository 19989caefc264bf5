"""What does one rank of a tensor-parallel group have of a model that isn't written by parts? What a plan gives it.

Of a transformers model ``base_model_tp_plan`` of its config says of which matrices ranks have columns or rows, and of
experts parts of each one's. What reads several of them takes its input once for all. Embedding and head are parted by
the vocabulary and the loss is that of a rank's columns, as in Megatron-LM and torchtitan. For others the user says it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from ....errors import BadInput
from ....zoo.text.rank_part import Group
from ....zoo.text.vocabulary import IGNORED
from ..network import kind_of

COLUMNS = ("colwise", "packed_colwise")
SUMMED = "moe_tp_experts"  # what a module puts out, whose weights are said one by one
COPIED = "replicated_with_grad_allreduce"  # used by each rank's part, so that gradients are summed
WHOLE = ("replicate", COPIED, "mla_kv_a_proj")
HEADS = ("num_attention_heads", "num_key_value_heads")


class Role(NamedTuple):
    """What a module does beside its own forward: take a part of its input along the sequence, gather its input for
    products with columns, sum what products with rows put out, or gradients of weights that all have, or let tokens go
    to experts and back."""

    scatters: bool = False
    reads: bool = False
    sums: bool = False
    copied: bool = False
    trades: bool = False


def spread(model: Any, group: Group) -> None:
    """Leave of the experts of each layer of ``model`` what one of the ranks has that share them; BadInput where that
    isn't known of it."""
    found = [x for x in model.modules() if any(p is not None and p.dim() == 3 for p in x._parameters.values())]
    if group.ranks > 1 or not found or not all(hasattr(x, "num_experts") for x in found):
        raise BadInput(
            f"expert_ranks: of {type(model).__name__} the experts cannot be split here, or not together with tensor"
        )
    for module in found:
        count, rest = divmod(module.num_experts, group.experts)
        if rest:
            raise BadInput(f"experts: {group.experts} ranks don't share {module.num_experts} evenly")
        for name, weight in list(module._parameters.items()):
            if weight is not None and len(weight) == module.num_experts:
                Group().part_weight(module, name, 0, count)
        kind: Any = type(module)
        module.num_experts, module.__class__ = count, _parted(kind, group, Role(trades=True))


def part_of(model: Any, group: Group) -> None:
    """Leave of ``model`` what one rank of ``group`` has; BadInput where its plan, or a size, can't be parted."""
    text = model.config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise BadInput(f"tensor: {type(model).__name__} has no plan in transformers (base_model_tp_plan)")
    if group.place is not None:
        refuse_dropout([model], getattr(text, "attention_dropout", 0))
    if group.sequence_parallel and SUMMED in plan.values():
        raise BadInput("sequence_parallel: experts cannot be split along the sequence; leave it out")
    for name in HEADS:
        group.share(getattr(text, name, None) or group.ranks, name.removeprefix("num_").replace("_", " "))
    roles = dict[nn.Module, Role]()
    base = getattr(model, model.base_model_prefix, model)
    table = model.get_input_embeddings()
    for path, style in _named(base, plan):
        place, _, name = path.rpartition(".")
        parent, part = base.get_submodule(place), getattr(base.get_submodule(place), name)
        if style == COPIED:
            roles[part] = Role(copied=group.place is not None)
        elif group.place is not None and style not in (*COLUMNS, "rowwise"):
            raise BadInput(f"tensor: {type(model).__name__} has {path} {style}, which is planned and not run")
        if style in WHOLE or part is table:
            continue
        if style not in (*COLUMNS, "rowwise", SUMMED):
            raise BadInput(f"tensor: the plan of {type(model).__name__} has {path} {style}, which isn't known here")
        columns = style in COLUMNS
        if isinstance(part, nn.Parameter):  # of experts: (experts, rows, columns)
            axis = part.dim() - (2 if columns else 1)
            group.part_weight(parent, name, axis, group.share(part.shape[axis], f"of {name}"))
        elif style == SUMMED:
            roles[part] = Role(reads=True, sums=True)
        else:
            _part_linear(part, name, columns, group, 2 if style == "packed_colwise" else 1)
            roles[parent if columns else part] = Role(reads=columns, sums=not columns)
    if group.place is not None:
        _part_loss(model, table.num_embeddings, group)
    _part_vocabulary(model, text, table, group, roles)
    if group.sequence_parallel:
        blocks = base.get_submodule(next(x for x in plan if ".*" in x).partition(".*")[0])
        roles[blocks[0]] = Role(scatters=True)
    for module, role in roles.items():
        _take_role(module, group if module is not table else group._replace(sequence_parallel=False), role)


def part_by(layers: Any, plan: Any, what: str, group: Group) -> None:
    """Leave of ``layers``, one module or several, what one rank of ``group`` has by the ``plan`` that ``what`` names:
    how each module is parted whose name there fits a pattern, in words of transformers or as a torch ParallelStyle."""
    if not isinstance(plan, Mapping):
        raise BadInput(
            f"{what}: returned {kind_of(plan)}, not a dict such as {{'*.up': 'colwise', '*.down': 'rowwise'}}"
        )
    whole = layers if isinstance(layers, nn.Module) else nn.ModuleList(layers)
    refuse_dropout([whole])
    words = {str(pattern): _word(style, f"{what}: {pattern}") for pattern, style in plan.items()}
    found = list(_named(whole, words))
    unknown = next((x for x in words if not any(_rule(x).fullmatch(path) for path, _ in found)), None)
    if unknown is not None:
        raise BadInput(f"{what}: no module is called {unknown!r}")
    for path, style in found:
        part = whole.get_submodule(path)
        columns = style == "colwise"
        if style == COPIED:
            _take_role(part, group, Role(copied=group.place is not None))
            continue
        if isinstance(part, nn.Embedding) and not columns:
            group.parted(part, 0, group.share(part.num_embeddings, f"rows of {path}"))
        elif isinstance(part, nn.Linear):
            _part_linear(part, path, columns, group)
        else:
            raise BadInput(
                f"{what}: {path} is a {type(part).__name__}; an nn.Linear, or rowwise an nn.Embedding, can be"
            )
        _take_role(part, group, Role(reads=columns, sums=not columns))


def _word(style: Any, where: str) -> str:
    """Return the word for a style of torch's with the layouts that it has if nothing is said, or the word itself."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for kind, word in ((ColwiseParallel, "colwise"), (RowwiseParallel, "rowwise")):
        if style in (word, COPIED) or (type(style) is kind and repr(style) == repr(kind())):
            return COPIED if style == COPIED else word
    raise BadInput(f"{where}: {style!r} is neither ColwiseParallel(), RowwiseParallel(), colwise, rowwise nor {COPIED}")


def refuse_dropout(modules: Iterable[nn.Module], more: float = 0) -> None:
    """Raise BadInput where any of ``modules`` has dropout: in its part each rank would draw the same."""
    own = [
        x for module in modules for x in module.modules() if isinstance(x, nn.modules.dropout._DropoutNd) and x.p > 0
    ]
    if own or more:
        raise BadInput("dropout: ranks that run a layer together would draw the same in their parts; set it to 0")


def _part_linear(part: Any, name: str, columns: bool, group: Group, blocks: int = 1) -> None:
    whole = part.out_features if columns else part.in_features
    group.parted(part, 0 if columns else 1, group.share(whole, f"of {name}"), blocks)


def _part_loss(model: Any, vocabulary: int, group: Group) -> None:
    """Let the loss be that of a rank's columns of the logits; BadInput for another one than of the next token."""
    if getattr(model, "loss_type", None) != "ForCausalLM":
        raise BadInput(
            f"tensor: the loss of {type(model).__name__} isn't that of the next token, so run has no part of it"
        )

    def loss(logits: Tensor, labels: Any, shift_labels: Any = None, **_: Any) -> Tensor:
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        return group.token_loss(logits.float().flatten(0, 1), shift_labels.flatten(), vocabulary)

    model.loss_function = loss


def _part_vocabulary(model: Any, text: Any, table: Any, group: Group, roles: dict[nn.Module, Role]) -> None:
    """Part embedding and head; whether they are one weight stays as it was."""
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    text.vocab_size = group.rows(table.num_embeddings)
    if hasattr(model, "vocab_size"):  # by which some models count their logits
        model.vocab_size = text.vocab_size
    group.parted(table, 0, text.vocab_size)
    roles[table] = Role(sums=True)
    if head is None:
        return
    group.parted(head, 0, text.vocab_size)
    if tied:
        head.weight = table.weight
    roles[head] = Role(reads=True)


def _named(base: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield every module and every parameter that the plan names, with how it is parted."""
    rules = [(_rule(name), style) for name, style in plan.items()]
    paths = [*(x for x, _ in base.named_modules()), *(x for x, _ in base.named_parameters())]
    for path in paths:
        style = next((style for rule, style in rules if rule.fullmatch(path)), None)
        if style is not None:
            yield path, style


def _rule(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"[^.]+"))


def _take_role(module: nn.Module, group: Group, role: Role) -> None:
    kind: Any = type(module)
    module.__class__ = _parted(kind, group, role)


@cache
def _parted(kind: Any, group: Group, role: Role) -> type:
    """Return the class of modules of a ``kind`` that exchange what their ``role`` says; one class for like modules, so
    that like blocks stay alike."""

    class Part(kind):  # type: ignore[misc]  # whatever kind
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if role.scatters or role.reads:
                args, kwargs = _with_input(args, kwargs, group, role.scatters)
            values = group.place is not None and role.sums
            if values and isinstance(self, nn.Linear):
                return group.added(args[0], self)
            if values and isinstance(self, nn.Embedding):
                return group.looked_up(args[0], self, super().forward)
            if role.trades:  # of tokens, the numbers of their experts, their shares
                times = args[1].shape[-1]
                return group.traded(super().forward(group.traded(args[0], times), *args[1:], **kwargs), times)
            out = super().forward(*args, **kwargs)
            if not role.sums:
                return out
            return group.summed(out) if isinstance(out, Tensor) else (group.summed(out[0]), *out[1:])

    for name in ("weight", "bias") if role.copied else ():
        setattr(Part, name, property(partial(_copied, group, name)))
    Part.__name__, Part.__qualname__, Part.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Part


def _copied(group: Group, name: str, module: nn.Module) -> Tensor | None:
    whole = module._parameters.get(name)
    return None if whole is None else group.given(whole)


def _with_input(args: Any, kwargs: Any, group: Group, scatters: bool) -> tuple[Any, Any]:
    """Return arguments whose first, or hidden states, are a part along the sequence, or what products read."""
    x = args[0] if args else kwargs["hidden_states"]
    x = x.narrow(1, 0, x.shape[1] // group.ranks).contiguous() if scatters else group.given(x)
    return (x, *args[1:]) if args else args, kwargs if args else {**kwargs, "hidden_states": x}
