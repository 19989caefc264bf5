"""What does an operation of torch ask of a device? Its kernels: kind, flops, bytes, and the products they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ...cost.roofline import Product

aten = torch.ops.aten
_NO_KERNEL = {  # they make a tensor's description or reserve memory
    aten._unsafe_view, aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided, aten._reshape_alias, aten.lift_fresh, aten.set_, aten.resize_,
}  # fmt: skip
_GATHERS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
_SCATTERS = {aten.scatter_add_, aten.scatter_, aten.index_add_, aten.index_put_}  # in place: a few numbers of many
_FOR_ITS_SHAPE = {aten.nll_loss_backward: 1, aten.nll_loss2d_backward: 1}  # arguments whose numbers nothing reads
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward, aten._convolution, aten.cudnn_convolution}
_KINDS = {  # those that an accelerator may have a rate for; convolutions go by their shape
    "batch-norm": (
        aten.native_batch_norm, aten.native_batch_norm_backward, aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward,
    ),
    "norm": (
        aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm,
        aten.native_group_norm_backward,
    ),
    "activation": (
        aten.relu, aten.relu_, aten.threshold_backward, aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward,
        aten.hardtanh, aten.hardtanh_, aten.hardtanh_backward,
    ),
    "pooling": (
        aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward,
        aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward,
    ),
    "product": (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm),
}  # fmt: skip
_PRODUCTS = _KINDS["product"]
_KIND_OF = {packet: kind for kind, packets in _KINDS.items() for packet in packets}
_ATTENTION = {  # times of a forward's flops (backward it is one again, and four products), and where the query is
    aten._scaled_dot_product_flash_attention_for_cpu: (1.0, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (2.5, 1),
}


class Kernel(NamedTuple):
    """A kernel: its kind (:data:`.files.accelerators.KINDS`), flops on numbers of ``dtype``, bytes that it reads and
    writes, and the product that it makes, if it is one."""

    kind: str
    flops: float
    dtype: torch.dtype | None
    moved: int
    product: Product | None = None


def kernels_of(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Iterator[Kernel]:
    """Yield the kernels of an operation that returned ``out``."""
    made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
    unread = args[_FOR_ITS_SHAPE[packet]] if packet in _FOR_ITS_SHAPE else None
    filled = kwargs.get("out")
    given = ([x for x in args if x is not unread], [x for x in kwargs.values() if x is not filled])
    read = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    if packet is aten.convolution_backward and any(args[10][:2]):
        yield from _convolution_gradients(args)
        return
    written = sum(map(touched, made)) or sum(map(touched, _changed(packet, args)))
    if packet in _SCATTERS:
        written = max(map(touched, read[1:]), default=0)
    limit = written if packet in _GATHERS | _SCATTERS else None  # a look-up reads as much as it puts out
    moved = written + sum(touched(x) if limit is None else min(touched(x), limit) for x in read)
    flops = _flops(packet, args, kwargs, out)
    dtype = next((x.dtype for x in read if x.is_floating_point()), None)
    if packet in _CONVOLUTIONS:
        groups = int(args[8])
        kind = _convolution_kind(args[1], args[3], groups)
        yield Kernel(kind, flops, dtype, moved, _convolved(out, groups, flops))
    elif packet in _PRODUCTS:
        yield Kernel("product", flops, dtype, moved, _product(packet, args))
    elif packet in _ATTENTION:
        yield Kernel("attention", flops, dtype, moved)
    else:
        yield Kernel(_KIND_OF.get(packet, "other"), flops, dtype, moved)


def _product(packet: Any, args: Sequence[Any]) -> Product:
    one, other = args[1:3] if packet in (aten.addmm, aten.baddbmm) else args[:2]
    if packet is aten._grouped_mm:  # rows of one, or the depth of weights' gradients, are parted by the groups
        groups = int((other if other.dim() == 3 else args[2]).shape[0])
        rows, depth = int(one.shape[-2]), int(one.shape[-1])
        if other.dim() == 3:
            return Product(groups, -(-rows // groups), int(other.shape[-1]), depth)
        return Product(groups, rows, int(other.shape[-1]), depth / groups, weights=True)
    batch = int(one.shape[0]) if one.dim() == 3 else 1
    return Product(batch, int(one.shape[-2]), int(other.shape[-1]), int(one.shape[-1]))


def _convolution_kind(weight: Tensor, stride: Sequence[int], groups: int) -> str:
    if groups > 1:
        return "convolution-grouped"
    shape = tuple(weight.shape[2:])
    if all(n == 1 for n in shape):
        return "convolution-1x1"
    return "convolution-3x3" if shape == (3, 3) and all(n == 1 for n in stride) else "convolution"


def _convolved(result: Tensor, groups: int, flops: float) -> Product:
    """Return the product that a convolution with ``result`` is: positions by channels, as deep as its flops say."""
    rows, columns = result.numel() // int(result.shape[1]), int(result.shape[1]) // groups
    return Product(groups, rows, columns, flops / (2 * groups * rows * columns))


def _convolution_gradients(args: Sequence[Any]) -> Iterator[Kernel]:
    """Yield the kernels of a convolution's backward: the gradients of input, weight and bias, those that are asked."""
    gradient, x, weight, _, stride, _, _, transposed, _, groups, mask = args[:11]
    of_input, of_weight, of_bias = mask
    kind = _convolution_kind(weight, stride, groups)
    positions = (x if transposed else gradient).numel() // int((x if transposed else gradient).shape[1])
    flops = 2.0 * positions * weight.numel()  # of each weight there is one product at each position
    moved = touched(gradient) + touched(x) + touched(weight)
    if of_input:
        yield Kernel(kind, flops, x.dtype, moved, _convolved(x, groups, flops))
    if of_weight:
        columns = int(weight.shape[0]) // groups
        rows = weight.numel() // int(weight.shape[0])
        yield Kernel(kind, flops, x.dtype, moved, Product(groups, rows, columns, positions, weights=True))
    if of_bias:
        yield Kernel("other", 0.0, x.dtype, touched(gradient))


def is_free(func: Any, packet: Any) -> bool:
    """Whether an operation starts no kernel: it makes a view, or reserves memory."""
    if packet in _NO_KERNEL or func.namespace == "prim":
        return True
    returns = func._schema.returns
    if not returns:
        return False
    alias = returns[0].alias_info
    return alias is not None and not alias.is_write  # a view


def _changed(packet: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that an operation without results changes in place, such as an optimizer's; gradients only if
    it has to scale them, which no optimizer here has to."""
    arguments = getattr(packet, packet.overloads()[0])._schema.arguments
    written = [b.name for b in arguments if b.alias_info is not None and b.alias_info.is_write and b.name != "grads"]
    given = [a for a, b in zip(args, arguments, strict=False) if b.name in written]
    return [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]


def touched(x: Tensor) -> int:
    """Return the bytes of memory behind ``x``: an expanded tensor has fewer than its shape says."""
    return min(x.nbytes, x.untyped_storage().nbytes())


def _flops(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    if packet in _ATTENTION:
        times, first = _ATTENTION[packet]
        query, key, value = args[first : first + 3]
        return times * _attention_flops(query, key, value, bool(_argument(packet, args, kwargs, "is_causal")))
    if packet is aten._grouped_mm:
        return 2.0 * args[0].numel() * int(args[1].shape[-1])
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


def _argument(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    names = [argument.name for argument in packet.default._schema.arguments]
    index = names.index(name)
    return args[index] if index < len(args) else kwargs.get(name, packet.default._schema.arguments[index].default_value)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> float:
    """Return the flops of two products; a causal kernel leaves out the half above the diagonal."""
    batch, heads, rows, width = query.shape
    columns = key.shape[2]
    return 2.0 * batch * heads * rows * columns * (width + value.shape[3]) * (0.5 if causal else 1.0)
