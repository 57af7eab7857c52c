"""attention for PyTorch: the public function.

It checks its inputs, lowers the mask and calls the operator of `onchip.attention.torch`.
"""

from typing import Literal, overload

from torch import Tensor, is_tensor

from onchip.attention.masks import OP, Causal, Mask, check_mask, check_mask_values
from onchip.attention.problem import AttentionOptions, Layout, check_shapes, rows_of_block, scale_of
from onchip.attention.torch import arrays as _arrays  # noqa: F401  what masks are made by
from onchip.attention.torch.plain import ATTENTION, AttentionCall
from onchip.core.backends import choose_backend
from onchip.frontend.options import ScratchBytes, scratch_in_bytes, shapes_of
from onchip.frontend.torch_inputs import LOSS_DTYPES, check_kinds, one_dtype, require_tensors, torch_refusal
from onchip.frontend.torch_register import needed

BACKENDS = ("plain",)
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
    backend: Literal["auto", "plain", "torch"] = "auto",
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
    backend: Literal["auto", "plain", "torch"] = "auto",
) -> tuple[Tensor, Tensor]: ...
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
    backend: Literal["auto", "plain", "torch"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention under a mask that is data, without the [queries, keys] scores.

    For each query and head, over the keys j that the mask lets it see::

        s[j] = scale * q @ k[j],    z[j] = softcap * tanh(s[j] / softcap)     # without softcap s[j]
        lse  = log(exp(sink) + sum(exp(z)))                                   # without sinks log(sum(exp(z)))
        out  = sum(exp(z[j] - lse) * v[j])

    So without these options it is `F.scaled_dot_product_attention` with the mask as a matrix, in float32.

    Args:
        q: [B, Tq, Hq, D] float32, bfloat16, float16 or float64, any strides.  B may be absent in all three.
        k: [B, Tk, Hk, D] of q's dtype.  Head h of q goes with head h // (Hq / Hk) of k and v.
        v: [B, Tk, Hk, Dv] of q's dtype.
        mask: one of `onchip.masks`, or several combined by &: `Full()`, `Causal()`, `Window(left)`, `Documents(ids)`,
            `Chunked(size)`, `PrefixLM(lengths)`, `Blocks(ids)`, `Tree(stop)`, `Intervals(start, end, stop)`,
            `Blocked(blocks, tile)`.  `mask.lower(B, Tq, Tk, like=q)` is what layers can share.
        scale: factor of the products, by default 1 / sqrt(D).
        softcap: above 0, or None: squashes the scores smoothly into (-softcap, softcap).
        sinks: [Hq] of any float dtype: a score of each head that takes part in the softmax and has no value; neither
            scaled nor capped.
        layout: "bthd", or "bhtd" for q [B, Hq, Tq, D] and likewise k, v and the results.
        return_lse: also return each query's log-sum-exp, which is differentiable.
        scratch_bytes: bound on the peak memory above inputs, results and returned gradients: bytes, a text like "1GiB"
            or "300 MiB".  Default: 256 MiB, or what 16 queries need.
        check_inputs: check the mask's numbers on the GPU too, which synchronises.  On the CPU they always are.
        backend: "plain" (the framework's own products, on any device) or "auto", the same.  There are no kernels yet:
            on a GPU every block of queries reads all keys, and other libraries are faster.

    Returns:
        [B, Tq, Hq, Dv] of q's dtype, under autocast of autocast's; with return_lse `(out, lse)`, lse [B, Tq, Hq] in
        float32, of float64 in float64.  A query that sees nothing has out 0, lse -inf (or its sink), and no gradient.
        What isn't finite makes NaN of the queries that see it, in all heads, and of no other.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, range or option, or a scratch_bytes that is too small (it names the
            smallest); on the CPU (with check_inputs also on the GPU) an id of `Documents` that comes back.
        RuntimeError: differentiated twice, or called inside a torch.func transform.

    Memory: kept for backward are q, k, v, out and 4 * B * Tq * Hq bytes; `scratch_parts` of
    `onchip.attention.problem` is the formula of what is beside these.

    Example:
        >>> import torch
        >>> from onchip.masks import Causal, Documents
        >>> from onchip.torch import attention
        >>> q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
        >>> packed = Documents(torch.tensor([0, 0, 0, 0, 1, 1])) & Causal()
        >>> out = attention(q, k, v, packed)
        >>> torch.testing.assert_close(out[:, 4:], attention(q[:, 4:], k[:, 4:], v[:, 4:]))

    Sources: FlashAttention (arXiv:2205.14135); FlashMask (arXiv:2410.01359) for masks as ranges.
    """
    named = {"q": q, "k": k, "v": v, "sinks": sinks}
    tensors = require_tensors(OP, named, optional=("sinks",))
    check_mask(mask, is_tensor)
    check_kinds(OP, tensors, integers=(), labels=("sinks",), dtypes=LOSS_DTYPES)
    options = AttentionOptions(scale, softcap, layout, scratch_in_bytes(OP, scratch_bytes, 0), check_inputs, return_lse)
    p = check_shapes(layout, shapes_of(tensors))
    dtype = one_dtype(OP, {"q": q, "k": k, "v": v})
    choose_backend(OP, backend, {"plain": torch_refusal(q.device)})
    if check_inputs or q.device.type == "cpu":
        check_mask_values(mask)
    grads = needed(q, k, v, sinks)
    rows_of_block(p, dtype.itemsize, options.scratch_bytes, backward=any(grads), softcap=softcap is not None)
    whole = [x if x.ndim == 4 else x[None] for x in (q, k, v)]
    if layout == "bhtd":
        whole = [x.transpose(1, 2) for x in whole]
    lowered = mask.lower(p.batch, p.queries, p.keys, q)
    for name in ("start", "end", "stop", "blocks"):
        x = getattr(lowered, name)
        if x is not None and x.device != q.device:
            raise ValueError(f"{OP}: the mask is on {x.device} but q is on {q.device}; move it there")
    call = AttentionCall(
        whole[0], whole[1], whole[2], sinks, lowered.start, lowered.end, lowered.stop, lowered.blocks, lowered.tile,
        scale_of(options, p), dtype, p, options, grads,
    )  # fmt: skip
    out, lse = ATTENTION(call)
    if layout == "bhtd":
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    if q.ndim == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out
