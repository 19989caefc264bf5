"""What does an operation of torch ask of a device? Its kernels: kind, flops, bytes, and the products they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...cost.roofline import Attended, Blocks, Product, Shape
from ..model.operations import arguments_of, aten, is_view, tensors_among, written_by

_NO_KERNEL = {  # they make a tensor's description or reserve memory
    aten._unsafe_view, aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided, aten._reshape_alias, aten.lift_fresh, aten.set_, aten.resize_,
}  # fmt: skip
_GATHERS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
_SCATTERS = {aten.scatter_add_, aten.scatter_, aten.index_add_, aten.index_put_}  # in place: a few numbers of many
_FOR_ITS_SHAPE = {aten.nll_loss_backward: 1, aten.nll_loss2d_backward: 1}  # arguments whose numbers nothing reads
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward, aten._convolution, aten.cudnn_convolution}
_COLOURS = 4  # channels of pictures, at most, which tensor cores don't read as they like
_DEPTHWISE = "convolution-depthwise"  # by kernels that make no product
_KINDS = {  # those that an accelerator may have a rate for; convolutions go by their shape
    "batch-norm": (aten.native_batch_norm, aten.cudnn_batch_norm),
    "batch-norm-backward": (aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward),
    "norm": (aten.native_layer_norm, aten.native_group_norm),
    "norm-backward": (aten.native_layer_norm_backward, aten.native_group_norm_backward),
    "softmax": (
        aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data,
    ),
    "update": (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_),
    "activation": (
        aten.relu, aten.relu_, aten.threshold_backward, aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward,
        aten.hardtanh, aten.hardtanh_, aten.hardtanh_backward,
    ),
    "pooling": (aten.max_pool2d_with_indices, aten._adaptive_avg_pool2d),
    "pooling-backward": (aten.max_pool2d_with_indices_backward, aten._adaptive_avg_pool2d_backward),
    "pooling-average": (aten.avg_pool2d,),
    "pooling-average-backward": (aten.avg_pool2d_backward,),
    "product": (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm, aten._grouped_mm),
}  # fmt: skip
_PRODUCTS = _KINDS["product"]
_KIND_OF = {packet: kind for kind, packets in _KINDS.items() for packet in packets}
_ATTENTION = {  # times of a forward's flops (backward it is one again, and four products), and where the query is
    aten._scaled_dot_product_flash_attention_for_cpu: (1.0, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (2.5, 1),
}


class Kernel(NamedTuple):
    """A kernel: its kind (:data:`.files.accelerators.KINDS`), flops on numbers of ``dtype``, bytes that it reads and
    writes, the shape of what it makes, where that counts, and whether it is a convolution of 16 bits whose channels
    come last in memory."""

    kind: str
    flops: float
    dtype: torch.dtype | None
    moved: int
    shape: Shape | None = None
    last: bool = False


def kernels_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Iterator[Kernel]:
    """Yield the kernels of an operation that returned ``out``."""
    packet: Any = getattr(func, "overloadpacket", None)
    made = tensors_among(out)
    unread = args[_FOR_ITS_SHAPE[packet]] if packet in _FOR_ITS_SHAPE else None
    filled = kwargs.get("out")
    given = ([x for x in args if x is not unread], [x for x in kwargs.values() if x is not filled])
    read = tensors_among(given)
    if packet is aten.convolution_backward and any(args[10][:2]):
        yield from _convolution_gradients(args)
        return
    written = sum(map(touched, made))
    if (
        not written
    ):  # as an optimizer's; gradients change only if they have to be scaled, which no optimizer here has to
        written = sum(map(touched, written_by(func, args, kwargs, but="grads")))
    if packet in _SCATTERS:
        written = max(map(touched, read[1:]), default=0)
    limit = written if packet in _GATHERS | _SCATTERS else None  # a look-up reads as much as it puts out
    moved = written + sum(touched(x) if limit is None else min(touched(x), limit) for x in read)
    causal = packet in _ATTENTION and bool(arguments_of(func, args, kwargs).get("is_causal"))
    flops = _flops(packet, args, kwargs, out, causal)
    dtype = next((x.dtype for x in read if x.is_floating_point()), None)
    if packet in _CONVOLUTIONS:
        groups = int(args[8])
        kind = _convolution_kind(args[1], args[3], groups)
        yield from _laid_out(kind, args[0], touched(args[0]) + written)
        yield Kernel(kind, flops, dtype, moved, _convolved(kind, out, groups, flops), _last(args[0]))
    elif packet in _PRODUCTS:
        yield Kernel("product", flops, dtype, moved, _product(packet, args))
    elif packet in _ATTENTION:
        backward = _ATTENTION[packet][1]
        query, key = args[backward : backward + 2]
        keys = key.shape[2] * (0.5 if causal else 1.0)
        shape = Attended(keys, query.shape[3], 500 if backward else 300)
        yield Kernel("attention" + "-backward" * backward, flops, dtype, moved, shape)
    else:
        kind = _KIND_OF.get(packet, "other")
        if kind.startswith("pooling"):
            flops = _pooled(packet, args, out)
        blocks = Blocks(int(args[kind.endswith("backward")].shape[1])) if kind.startswith("batch-norm") else None
        yield Kernel(kind, flops, dtype, moved, blocks)


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


def _pooled(packet: Any, args: Sequence[Any], out: Any) -> float:
    """Return how many numbers the windows of a pooling hold, all together."""
    if packet in (aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward):
        return 0.0
    backward = packet in (aten.max_pool2d_with_indices_backward, aten.avg_pool2d_backward)
    windows = args[0] if backward else out[0] if isinstance(out, tuple) else out
    sides = args[1 + backward]
    return float(windows.numel() * sides[0] * sides[-1])


def _convolution_kind(weight: Tensor, stride: Sequence[int], groups: int) -> str:
    if groups > 1:
        return _DEPTHWISE if weight.shape[1] == 1 else "convolution-grouped"
    if weight.shape[1] <= _COLOURS:
        return "convolution-stem"
    shape = tuple(weight.shape[2:])
    if all(n == 1 for n in shape):
        return "convolution-1x1"
    return "convolution-3x3" if shape == (3, 3) and all(n == 1 for n in stride) else "convolution"


def _convolved(kind: str, result: Tensor, groups: int, flops: float) -> Product | None:
    """Return the product that a convolution with ``result`` is: positions by channels, as deep as its flops say."""
    if kind == _DEPTHWISE:
        return None
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
    both, last = touched(gradient) + touched(x), _last(x)
    if of_input:
        yield from _laid_out(kind, x, both)
        yield Kernel(kind, flops, x.dtype, moved, _convolved(kind, x, groups, flops), last)
    if of_weight:
        columns = int(weight.shape[0]) // groups
        rows = weight.numel() // int(weight.shape[0])
        product = None if kind == _DEPTHWISE else Product(groups, rows, columns, positions, weights=True)
        yield from _laid_out(kind, x, both)
        yield Kernel(kind + "-weights", flops, x.dtype, moved, product, last)
    if of_bias:
        yield Kernel("other", 0.0, x.dtype, touched(gradient))


def _last(x: Tensor) -> bool:
    return x.dim() == 4 and x.element_size() == 2 and x.is_contiguous(memory_format=torch.channels_last)


def _laid_out(kind: str, x: Tensor, moved: int) -> Iterator[Kernel]:
    """Yield what brings ``moved`` bytes into the order that tensor cores read and back, for convolutions of 16 bits."""
    if x.element_size() == 2 and not _last(x) and kind != _DEPTHWISE:
        yield Kernel("other", 0.0, x.dtype, 2 * moved)


def is_free(func: Any, packet: Any) -> bool:
    """Whether an operation starts no kernel: it makes a view, or reserves memory."""
    return packet in _NO_KERNEL or func.namespace == "prim" or is_view(func)


def touched(x: Tensor) -> int:
    """Return the bytes of memory behind ``x``: an expanded tensor has fewer than its shape says."""
    return min(x.nbytes, x.untyped_storage().nbytes())


def _flops(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, causal: bool) -> float:
    if packet in _ATTENTION:
        times, first = _ATTENTION[packet]
        query, key, value = args[first : first + 3]
        batch, heads, rows, width = query.shape
        products = 2.0 * batch * heads * rows * key.shape[2] * (width + value.shape[3])  # two of them
        return float(
            times * (products * (0.5 if causal else 1.0))
        )  # a causal kernel leaves out the half above the diagonal
    if packet is aten._grouped_mm:
        return 2.0 * float(args[0].numel() * args[1].shape[-1])
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
