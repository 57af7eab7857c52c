"""attention for PyTorch: the public function.

It checks its inputs, lowers the mask and calls the operator of `onchip.attention.torch`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Literal, overload

import torch
from torch import Tensor, is_tensor

from onchip.attention.masks import (
    OP,
    Causal,
    Intervals,
    Mask,
    bounded,
    check_mask,
    check_mask_values,
    is_whole,
    mask_arrays,
    sees_blocks,
    with_arrays,
)
from onchip.attention.problem import AttentionOptions, AttentionProblem, Layout, check_shapes, rows_of_block, scale_of
from onchip.attention.torch import arrays as _arrays  # noqa: F401  what masks are made by
from onchip.attention.torch import plain
from onchip.attention.triton import op as kernels
from onchip.core.backends import choose_backend
from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import ScratchBytes, scratch_in_bytes, shapes_of
from onchip.frontend.torch_inputs import LOSS_DTYPES, check_kinds, one_dtype, require_tensors, torch_refusal
from onchip.frontend.torch_register import needed
from onchip.frontend.torch_repeat import repeatable
from onchip.frontend.torch_types import Backend

# Best first: "auto" asks them in this order.
BACKENDS = ("triton", "plain")
_CAUSAL = Causal()


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bthd",
    return_lse: Literal[False] = False,
    scratch_bytes: ScratchBytes = None,
    check_inputs: bool = False,
    backend: Backend = "auto",
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bthd",
    return_lse: Literal[True],
    scratch_bytes: ScratchBytes = None,
    check_inputs: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...
@repeatable
def attention(
    q: Tensor,  # [B, Tq, Hq, D]
    k: Tensor,  # [B, Tk, Hk, D]
    v: Tensor,  # [B, Tk, Hk, Dv]
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    layout: Layout = "bthd",
    return_lse: bool = False,
    scratch_bytes: ScratchBytes = None,
    check_inputs: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention under a mask that is data, without the [queries, keys] scores.

    For each query and head, over the keys j that the mask lets it see::

        s[j] = scale * q @ k[j],    z[j] = softcap * tanh(s[j] / softcap)     # without softcap s[j]
        lse  = log(exp(sink) + sum(exp(z)))                                   # without sinks log(sum(exp(z)))
        out  = sum(exp(z[j] - lse) * v[j])

    Without these options it is `F.scaled_dot_product_attention` with the mask as a matrix, in float32.

    Args:
        q: [B, Tq, Hq, D] float32, bfloat16, float16 or float64, any strides.  B may be absent in all three.
        k: [B, Tk, Hk, D] of q's dtype.  Head h of q goes with head h // (Hq / Hk) of k and v.
        v: [B, Tk, Hk, Dv] of q's dtype.
        mask: one of `onchip.masks`, or several combined by &: `Full()`, `Causal()`, `Window(left)`, `Documents(ids)`,
            `Chunked(size)`, `PrefixLM(lengths)`, `Blocks(ids)`, `Tree(stop)`, `Intervals(start, end, stop)`,
            `Blocked(blocks, tile)`.  `mask.lower(B, Tq, Tk, like=q)` is what layers can share.
        scale: factor of the products, by default 1 / sqrt(D).
        softcap: above 0, or None: squashes the scores smoothly into (-softcap, softcap).
        sinks: [Hq] of any float dtype: for each head a score that takes part in the softmax but has no value.  It is
            neither scaled nor capped.
        layout: "bthd", or "bhtd" if q is [B, Hq, Tq, D], and k, v and the results likewise.
        return_lse: also return each query's log-sum-exp, which is differentiable.
        scratch_bytes: bound on the peak memory above inputs, results and returned gradients: bytes, or a text like
            "1GiB" or "300 MiB".  The memory of the kernels follows from the sizes, and they refuse a bound below it;
            with heads of up to 128 numbers a bound below what the fastest gradients take chooses others (see Memory).
            Default for "plain": 256 MiB, or what 16 queries need.
        check_inputs: check the mask's numbers on the GPU too, which waits for the device.  On the CPU they are always
            checked.
        backend: "triton" (kernels for NVIDIA GPUs from compute capability 8.0 on, written for Hopper: bfloat16 or
            float16, D and Dv multiples of 8 up to 128, on Hopper up to 256, a scale above 0, any mask but `Blocked`),
            "plain" (PyTorch's own products, on any device; on a GPU every block of queries then reads all keys) or
            "auto": the first of these that can run the call.

    Returns:
        [B, Tq, Hq, Dv] of q's dtype (under autocast, of its dtype); with return_lse `(out, lse)`, with lse [B, Tq, Hq]
        in float32 (float64 for float64 inputs).  A query that sees nothing has out 0, lse -inf (or its sink), and no
        gradient.  A number that isn't finite makes the results of the queries that see it NaN, in all heads, and no
        other queries'.  With "triton" it does so only in its own head, but results and gradients of its neighbours in a
        tile of 128 tokens may be NaN too.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, range or option is wrong; scratch_bytes is too small (the message says what
            suffices); or, on the CPU (with check_inputs also on the GPU), an id of `Documents` comes back after
            another one.
        RuntimeError: the result is differentiated twice, or the call is inside a torch.func transform.

    Memory: q, k, v (or copies, where they are cast or copied), out, the mask's ranges and 4 * B * Tq * Hq bytes are
    kept for backward.  "triton" also needs Tq / 2 bytes for each row of the mask and, in backward, 8 * B * Tq * Hq
    bytes; tensors whose strides aren't multiples of 16 bytes, which TMA can't read, are copied first.  On Hopper, with
    D and Dv up to 64 (with masks of `Full` and `Causal` alone, up to 128), backward takes 4 * B * Hq * (64 + 1 / 64)
    bytes more for each query (from 65 on twice that; queries count in whole blocks of 64), unless scratch_bytes has no
    room for them, the mask has a `stop` (as `Tree`), or q, k and v don't all want gradients.  For "plain",
    `scratch_parts` of `onchip.attention.problem` is the formula.

    Example:
        >>> import torch
        >>> from onchip.masks import Causal, Documents
        >>> from onchip.torch import attention
        >>> q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
        >>> packed = Documents(torch.tensor([0, 0, 0, 0, 1, 1])) & Causal()
        >>> out = attention(q, k, v, packed)
        >>> torch.testing.assert_close(out[:, 4:], attention(q[:, 4:], k[:, 4:], v[:, 4:]))

    Sources: FlashAttention (arXiv:2205.14135); FlashMask (arXiv:2410.01359), for masks as ranges.
    """
    named = {"q": q, "k": k, "v": v, "sinks": sinks}
    tensors = require_tensors(OP, named, optional=("sinks",))
    check_mask(mask, is_tensor)
    check_kinds(OP, tensors, integers=(), labels=("sinks",), dtypes=LOSS_DTYPES)
    options = AttentionOptions(scale, softcap, layout, scratch_in_bytes(OP, scratch_bytes, 0), check_inputs, return_lse)
    p = check_shapes(layout, shapes_of(tensors))
    dtype = one_dtype(OP, {"q": q, "k": k, "v": v})
    scale_used = scale_of(options, p)
    grads = needed(q, k, v, sinks)
    backward, blocked = any(grads), sees_blocks(mask)
    reasons = refusals(
        q.device, dtype, p, options, scale_used, blocked=blocked, backward=backward, sinks=sinks is not None
    )
    chosen = choose_backend(OP, backend, reasons)
    if check_inputs or q.device.type == "cpu":
        check_mask_values(mask)
    if chosen == "plain":
        rows_of_block(p, dtype.itemsize, options.scratch_bytes, backward=backward, softcap=softcap is not None)
    whole = [x if x.ndim == 4 else x[None] for x in (q, k, v)]
    compute: Callable[..., tuple[Tensor, Tensor | None]] = _by_kernels if chosen == "triton" else _by_products
    out, lse = compute(whole, mask, sinks, scale_used, dtype, p, options, grads)
    if q.ndim == 3:
        out, lse = out[0], lse if lse is None else lse[0]
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def _by_products(
    given: Sequence[Tensor], mask: Mask, sinks: Tensor | None, scale: float, dtype: torch.dtype, p: AttentionProblem,
    options: AttentionOptions, grads: tuple[bool, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse on the framework's own products."""
    turned = options.layout == "bhtd"
    q, k, v = (x.transpose(1, 2) if turned else x for x in given)
    lowered = mask.lower(p.batch, p.queries, p.keys, q)
    start, end, stop, blocks = lowered.start, lowered.end, lowered.stop, lowered.blocks
    _check_devices(q, (start, end, stop, blocks))
    out, lse = plain.ATTENTION(
        plain.AttentionCall(q, k, v, sinks, start, end, stop, blocks, lowered.tile, scale, dtype, p, options, grads)
    )
    return (out.transpose(1, 2), lse.transpose(1, 2)) if turned else (out, lse)


def _by_kernels(
    given: Sequence[Tensor], mask: Mask, sinks: Tensor | None, scale: float, dtype: torch.dtype, p: AttentionProblem,
    options: AttentionOptions, grads: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out and, if it is returned, lse by the kernels."""
    q, k, v = given
    start, end, stop = None, None, None
    band = bounded(mask.band())
    if not band and torch.compiler.is_compiling():
        start, end, stop = _as_kernels_read(mask.ranges(p.batch, p.queries, p.keys, q))
    elif not band:
        tensors = mask_arrays(mask)
        _check_devices(q, tensors)
        if isinstance(mask, Intervals) and _is_read_by_kernels(mask, p):
            start, end, stop = mask.start, mask.end, mask.stop
        else:
            start, end, stop = stated.call(partial(_lowered, with_arrays(mask, repeat(...)), p), q, *tensors)
    cast = [x if x.dtype == dtype else stated.call(_cast, x, dtype) for x in given]
    call = kernels.KernelCall(
        q, k, v, sinks, cast[0], cast[1], cast[2], start, end, stop, band, is_whole(mask), scale, p, options, grads
    )  # fmt: skip
    made = kernels.ATTENTION(call)
    return made.out, made.lse


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype)


def _lowered(mask: Mask, p: AttentionProblem, like: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The ranges of a mask of these tensors."""
    return _as_kernels_read(with_arrays(mask, iter(tensors)).ranges(p.batch, p.queries, p.keys, like))


def _as_kernels_read(ranges: Intervals) -> tuple[Tensor, Tensor, Tensor | None]:
    """start, end and stop: int32, contiguous, of as many sequences each.

    They may reach beyond the queries and keys that there are: kernels clip them.
    """
    given = [x for x in (ranges.start, ranges.end, ranges.stop) if x is not None]
    rows = max(x.shape[0] for x in given)
    given = [
        x if x.dtype == torch.int32 else x.clip(0, min(2**31 - 1, torch.iinfo(x.dtype).max)).to(torch.int32)
        for x in given
    ]
    start, end, *stop = (
        x if x.shape[0] == rows and x.is_contiguous() else x.expand(rows, -1).contiguous() for x in given
    )
    return start, end, stop[0] if stop else None


def _is_read_by_kernels(mask: Intervals, p: AttentionProblem) -> bool:
    """Whether it is as `_as_kernels_read` makes it, as a lowered one mostly is."""
    rows, given = mask.start.shape[0], [mask.start, mask.end] + ([] if mask.stop is None else [mask.stop])
    if rows not in (1, p.batch) or not all(x.dtype == torch.int32 and x.is_contiguous() for x in given):
        return False
    return [x.shape for x in given] == [(rows, n) for n in (p.queries, p.queries, p.keys)][: len(given)]


def _check_devices(q: Tensor, tensors: Sequence[Tensor | None]) -> None:
    for x in tensors:
        if x is not None and x.device != q.device:
            raise ValueError(f"{OP}: the mask is on {x.device} but q is on {q.device}; move it there")


def refusals(
    device: torch.device,
    dtype: torch.dtype,
    p: AttentionProblem,
    options: AttentionOptions,
    scale: float,
    *,
    blocked: bool,
    backward: bool,
    sinks: bool,
) -> dict[str, str | None]:
    """Why each backend, best first, can't serve a call, or None."""
    triton = kernels.refusal(
        device, dtype, p, options, scale, blocked=blocked, backward=backward, sinks=sinks
    )  # fmt: skip
    return {"triton": triton, "plain": torch_refusal(device)}
