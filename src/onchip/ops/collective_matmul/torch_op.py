"""all_gather_matmul and matmul_reduce_scatter for PyTorch: the public functions and their operators.

Each function checks its inputs without reading a value, chooses a backend and calls its operator.  The ring is
`onchip.collectives.torch_ring`; the maths is in the package's docstring.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from zlib import crc32

import torch
from torch import Tensor

from onchip.collectives.problem import GATHER, SCATTER, check_shapes
from onchip.collectives.torch_ring import Ring, blocks, check_alike, reduced, refusal, ring_of
from onchip.core.backends import choose_backend
from onchip.frontend.options import require_bool, require_one_of, shapes_of
from onchip.frontend.torch_inputs import (
    LOSS_DTYPES,
    accumulator,
    check_kinds,
    check_weight_grad_out,
    dtype_name,
    one_dtype,
    require_tensors,
)
from onchip.frontend.torch_register import Made, Operator, Wanted, needed
from onchip.kernels.torch_products import linear, product, widen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Best first: the order in which "auto" asks them.
BACKENDS = ("ring",)
Backend = Literal["auto", "ring"]
Precision = Literal["full", "fp8"]


def all_gather_matmul(
    x_shard: Tensor,  # [T/n, K]
    weight: Tensor,  # [N, K]
    group: "ProcessGroup | None",
    *,
    bias: Tensor | None = None,  # [N]
    keep_gathered: bool = False,
    weight_grad_out: Tensor | None = None,  # [N, K] float32
    check_inputs: bool = False,
    backend: Backend = "auto",
    precision: Precision = "full",
) -> Tensor:
    r"""The tokens of all ranks times this rank's weight, each block multiplied while the next one arrives.

    With x_r the `x_shard` of rank r, of n ranks::

        out = cat([x_0, ..., x_{n-1}]) @ weight.T + bias

    It is a column-parallel linear layer behind a sequence-parallel one.  Backward sends the gradient of x's blocks
    around the ring, as `matmul_reduce_scatter`, and gathers x again for the weight's gradient.

    Args:
        x_shard: [T/n, K], this rank's tokens: float32, bfloat16, float16, on the CPU float64 too; of the same shape on
            every rank.  Of [T/n, ..., K] the first dimension is the one that is gathered.
        weight: [N, K], this rank's own, of x's dtype, any strides.  N may differ from rank to rank.
        group: the ranks, in whose order blocks are concatenated; None for all processes.
        bias: [N] of x's dtype, this rank's own.
        keep_gathered: keep the gathered x until backward, in place of gathering it again.
        weight_grad_out: [N, K] float32, contiguous: backward adds the weight's gradient to it, and weight gets none of
            its own.  For a main gradient that is kept in float32 over micro-batches.
        check_inputs: compare shapes, dtypes and options between ranks on the GPU too, forward and backward, which
            waits for the device; and of `matmul_reduce_scatter` the bias.  On the CPU they always are.
        backend: "ring" (PyTorch's own products and exchanges: gloo on the CPU, NCCL on GPUs), or "auto", which takes
            it.
        precision: "full", or "fp8": products of blockwise FP8 numbers, each rank's those of `fp8_linear`.  x and the
            output's gradient travel quantised, with their scales, and partial sums in float32.  Of several ranks T/n,
            with all leading dimensions, is a multiple of 128.  Not with keep_gathered or float64.

    Returns:
        [T, N], or [T, ..., N], of x's dtype, under autocast of autocast's, to which x, weight and bias are cast first.
        Gradients have the dtypes of their inputs, and x_shard's is summed over the ranks.  Sums are in float32 and
        rounded once, those over ranks too: the partial sums travel in float32.  Each is added up in the same order
        every time.

    Raises:
        TypeError: an argument of the wrong type or dtype, or no process group.
        ValueError: a wrong shape, device or option; a group without what moves x's device; and, where it is compared,
            a call that differs between ranks.  Where it isn't, such a call ends with the group's timeout, or worse.
        RuntimeError: differentiated twice, or called inside a torch.func transform.

    Memory, in numbers of x's dtype: two blocks of T/n * K (one of two ranks; none of one).  Kept for backward are
    x_shard and the weight, with keep_gathered T * K of the gathered x.  Backward has the larger of three float32 blocks
    of T/n * K, and two blocks of x with the weight's gradient in float32, N * K.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from onchip.torch import all_gather_matmul
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
        >>> out = all_gather_matmul(x, weight, None)
        >>> torch.testing.assert_close(out, x @ weight.T)  # of one rank
        >>> out.sum().backward()
        >>> dist.destroy_process_group()

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    require_bool(GATHER, "keep_gathered", keep_gathered)
    call = _call(
        GATHER, {"x_shard": x_shard, "weight": weight, "bias": bias}, group, weight_grad_out, check_inputs, backend,
        keep_gathered, precision,
    )  # fmt: skip
    return _run(GATHER, call, precision)


def matmul_reduce_scatter(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    group: "ProcessGroup | None",
    *,
    bias: Tensor | None = None,  # [N]
    weight_grad_out: Tensor | None = None,  # [N, K] float32
    check_inputs: bool = False,
    backend: Backend = "auto",
    precision: Precision = "full",
) -> Tensor:
    r"""The products of all ranks summed up, of which each gets its tokens: while one block is multiplied, sums travel.

    With x_q and weight_q those of rank q, on rank r of n::

        out = sum over q of (x_q @ weight_q.T)[r * T/n : (r + 1) * T/n] + bias

    It is a row-parallel linear layer in front of a sequence-parallel one.  Backward gathers the gradient of out once,
    as `all_gather_matmul`, for the gradients of x, weight and bias.

    Args:
        x: [T, K], all tokens, with this rank's features: float32, bfloat16, float16, on the CPU float64 too.  T is the
            same on every rank and a multiple of n.  Of [T, ..., K] the first dimension is the one that is split.
        weight: [N, K], this rank's own, of x's dtype, any strides.  K may differ from rank to rank.
        group: the ranks, in whose order tokens are split; None for all processes.
        bias: [N] of x's dtype, the same on every rank: it is added once, to the sum.
        weight_grad_out, check_inputs, backend, precision: as of `all_gather_matmul`.

    Returns:
        [T/n, N], or [T/n, ..., N], of x's dtype, under autocast of autocast's.  The sum over ranks is in float32 and
        rounded once: the partial sums travel in float32.  The addends of rank r's tokens are added in the order r + 1,
        r + 2, ..., r around the ring, so the same inputs give the same bits.  Gradients have the dtypes of their
        inputs.  That of bias is the whole one, of all tokens, with the same bits on every rank: don't reduce it again.

    Raises:
        TypeError, ValueError, RuntimeError: as `all_gather_matmul`; ValueError also for a T that isn't a multiple of n.

    Memory: three float32 blocks of T/n * N numbers (one of one rank).  Kept for backward are x and the weight.
    Backward has two blocks of T/n * N of x's dtype, and the weight's gradient in float32, N * K.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from onchip.torch import matmul_reduce_scatter
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
        >>> out = matmul_reduce_scatter(x, weight, None)
        >>> torch.testing.assert_close(out, x @ weight.T)  # of one rank
        >>> out.sum().backward()
        >>> dist.destroy_process_group()

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    named = {"x": x, "weight": weight, "bias": bias}
    call = _call(SCATTER, named, group, weight_grad_out, check_inputs, backend, precision=precision)
    return _run(SCATTER, call, precision)


# ------------------------------------------------------------------------------------------------------- what both do


class Call(NamedTuple):
    """The arguments of either operator."""

    x: Tensor  # [T/n, ..., K], or [T, ..., K] of matmul_reduce_scatter
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    cast_x: Tensor  # these three in the products' dtype: under autocast another than their own
    cast_weight: Tensor
    cast_bias: Tensor | None
    weight_grad_out: Tensor | None  # [N, K] float32; used in backward
    ring: Ring
    keep_gathered: bool
    check_inputs: bool
    grads: tuple[bool, ...]  # of x, weight, bias


class Outputs(NamedTuple):
    """The results of either operator."""

    out: Tensor
    gathered: Tensor | None  # [n, *x.shape]: all ranks' x, to be kept


class Kept(NamedTuple):
    """What backward is given."""

    x: Tensor | None  # for the weight's gradient
    gathered: Tensor | None  # in its place
    weight: Tensor | None  # for x's
    weight_grad_out: Tensor | None
    ring: Ring
    check_inputs: bool
    k: int
    dtypes: tuple[torch.dtype, ...]  # of x, weight and bias


def _call(
    op: str,
    named: dict[str, Any],
    group: Any,
    weight_grad_out: Any,
    check_inputs: bool,
    backend: str,
    keep_gathered: bool = False,
    precision: str = "full",
) -> Call:
    """The checked arguments of a public function; `named` are x, weight and bias."""
    require_bool(op, "check_inputs", check_inputs)
    require_one_of(op, "precision", precision, get_args(Precision))
    tensors = require_tensors(op, named, ("bias",))
    check_kinds(op, tensors, integers=(), dtypes=LOSS_DTYPES)
    ring = ring_of(op, group)
    check_shapes(op, shapes_of(tensors), ring.ranks)
    x, weight, bias = named.values()
    check_weight_grad_out(op, weight_grad_out, weight)
    choose_backend(op, backend, {"ring": refusal(ring, x.device)})
    dtype = one_dtype(op, tensors)
    if precision == "full":  # the other quantises x and weight as they are
        of_x, of_weight = _cast(x, dtype), _cast(weight, dtype)
        of_bias = None if bias is None else _cast(bias, dtype)
    else:
        of_x, of_weight, of_bias = x, weight, bias
    grads = needed(x, weight, bias)
    # One rank has nobody to differ from.
    check = ring.ranks > 1 and (check_inputs or x.device.type == "cpu")
    return Call(x, weight, bias, of_x, of_weight, of_bias, weight_grad_out, ring, keep_gathered, check, grads)


def _run(op: str, call: Call, precision: str) -> Tensor:
    """The result."""
    if precision == "fp8":
        from onchip.ops.collective_matmul import torch_fp8

        return torch_fp8.run(op, call)
    return (GATHERED if op == GATHER else SCATTERED)(call).out


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.detach().to(dtype)


def _agree(op: str, call: Any, more: str = "") -> None:
    """Raise unless the ranks' calls go together; `more` is what else they say of theirs."""
    if call.check_inputs:
        x, n = call.cast_x, len(call.weight)
        sizes = f"{list(x.shape)}" if op == GATHER else f"{list(x.shape[:-1])} tokens, N={n}"
        needs = ", ".join(name for name, grad in zip(("x", "weight", "bias"), call.grads, strict=True) if grad)
        kept = ", keep_gathered" if call.keep_gathered else ""
        of_bias = "" if op == GATHER or call.cast_bias is None else f", a bias of checksum {_checksum(call.cast_bias)}"
        said = f"{op}: {sizes}, {dtype_name(x.dtype)}, gradients of {needs or 'nothing'}{kept}{of_bias}{more}"
        check_alike(op, call.ring, said, x.device)


def _checksum(x: Tensor) -> str:
    # A copy: NumPy's views pin the memory of a parameter, which FSDP2 frees.
    copied = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    return f"{crc32(copied.view(torch.uint8).numpy().tobytes()):08x}"


def _agree_on_gradients(op: str, kept: Any, grad_out: Tensor, wanted: Wanted) -> None:
    """Raise unless the ranks want the same gradients, or some would wait for the others."""
    if kept.check_inputs:
        names = ", ".join(name for name, want in zip(("x", "weight", "bias"), wanted, strict=True) if want)
        check_alike(op, kept.ring, f"a backward of {op}, gradients of {names}", grad_out.device)


def _save(call: Call, outputs: Outputs) -> Kept:
    gathered = outputs.gathered if _keeps_gathered(call) else None
    return Kept(
        call.cast_x if call.grads[1] and gathered is None else None,
        gathered,
        call.cast_weight if call.grads[0] else None,
        call.weight_grad_out,
        call.ring,
        call.check_inputs,
        call.x.shape[-1],
        tuple((call.x if a is None else a).dtype for a in (call.x, call.weight, call.bias)),
    )


def _keeps_gathered(call: Call) -> bool:
    return call.keep_gathered and call.grads[1] and call.ring.ranks > 1


def _weight_sum(kept: Any, n: int, like: Tensor) -> Tensor:
    """Memory that the weight's gradient is added to: the caller's, or zeros in the dtype of sums."""
    out: Tensor | None = kept.weight_grad_out
    if out is not None:
        return out
    return like.new_zeros((n, kept.k), dtype=accumulator(like.dtype))


def _finished(kept: Any, grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None) -> Made:
    """The gradients in their inputs' dtypes; None for a weight's that was added to the caller's memory."""
    grad_weight = None if kept.weight_grad_out is not None else grad_weight
    made = grad_x, grad_weight, grad_bias
    return [None if g is None else g.to(dtype) for g, dtype in zip(made, kept.dtypes, strict=True)]


def _flat(x: Tensor) -> Tensor:
    """[..., K] as rows."""
    return x.reshape(-1, x.shape[-1])


def _split(x: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """The rows of [T, ..., K], one block for each rank."""
    return _flat(x).chunk(ranks)


# --------------------------------------------------------------------------------------------------- all_gather_matmul


def _gather_forward(call: Call) -> Outputs:
    _agree(GATHER, call)
    made = _gather_fake(call)
    weight = widen(call.cast_weight).t()
    outs = _split(made.out, call.ring.ranks)
    for rank, block in blocks(call.ring, call.cast_x, into=made.gathered):
        linear(outs[rank], _flat(block), weight, call.cast_bias)
    return made


def _gather_fake(call: Call) -> Outputs:
    x, ranks = call.cast_x, call.ring.ranks
    out = x.new_empty((ranks * x.shape[0], *x.shape[1:-1], len(call.weight)))
    return Outputs(out, x.new_empty((ranks, *x.shape)) if _keeps_gathered(call) else None)


def _gather_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    _agree_on_gradients(GATHER, kept, grad_out, wanted)
    ring, total = kept.ring, accumulator(grad_out.dtype)
    grads = _split(grad_out, ring.ranks)
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        assert kept.weight is not None
        weight = widen(kept.weight)
        shape = (grad_out.shape[0] // ring.ranks, *grad_out.shape[1:-1], kept.k)
        sums = grad_out.new_empty((len(grads[0]), kept.k), dtype=total)
        sums = reduced(ring, lambda rank, out: product(out, widen(grads[rank]), weight), sums)
        grad_x = sums.to(kept.dtypes[0]).view(shape)
        del sums
    if wanted[1]:
        grad_weight = _weight_sum(kept, grad_out.shape[-1], grad_out)
        if kept.gathered is not None:
            product(grad_weight, widen(_flat(grad_out)).t(), widen(_flat(kept.gathered)), accumulate=True)
        else:
            assert kept.x is not None
            for rank, block in blocks(ring, kept.x):
                product(grad_weight, widen(grads[rank]).t(), widen(_flat(block)), accumulate=True)
    if wanted[2]:
        grad_bias = _flat(grad_out).sum(0, dtype=total)
    return _finished(kept, grad_x, grad_weight, grad_bias)


def _gather_fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    shape = (grad_out.shape[0] // kept.ring.ranks, *grad_out.shape[1:-1], kept.k)
    return _fake_gradients(kept, grad_out, wanted, shape)


def _fake_gradients(kept: Kept, grad_out: Tensor, wanted: Wanted, shape: tuple[int, ...]) -> Made:
    """Memory for the gradients, of which x's has this shape."""
    n = grad_out.shape[-1]
    shapes = shape, (n, kept.k), (n,)
    made = [
        grad_out.new_empty(size, dtype=dtype) if want else None
        for size, dtype, want in zip(shapes, kept.dtypes, wanted, strict=True)
    ]
    return _finished(kept, *made)


GATHERED = Operator(
    GATHER,
    op=GATHER,
    forward=_gather_forward,
    fake=_gather_fake,
    save=_save,
    gradients=_gather_gradients,
    fake_gradients=_gather_fake_gradients,
    differentiable=("x", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)


# ------------------------------------------------------------------------------------------------ matmul_reduce_scatter


def _scatter_forward(call: Call) -> Outputs:
    _agree(SCATTER, call)
    made, ranks = _scatter_fake(call), call.ring.ranks
    xs, weight = _split(call.cast_x, ranks), widen(call.cast_weight).t()
    sums = call.cast_x.new_empty((len(xs[0]), len(call.weight)), dtype=accumulator(call.cast_x.dtype))
    sums = reduced(call.ring, lambda rank, out: product(out, widen(xs[rank]), weight), sums)
    if call.cast_bias is not None:
        sums += call.cast_bias
    made.out.copy_(sums.view(made.out.shape))
    return made


def _scatter_fake(call: Call) -> Outputs:
    x = call.cast_x
    return Outputs(x.new_empty((x.shape[0] // call.ring.ranks, *x.shape[1:-1], len(call.weight))), None)


def _scatter_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    _agree_on_gradients(SCATTER, kept, grad_out, wanted)
    ring, total, n = kept.ring, accumulator(grad_out.dtype), grad_out.shape[-1]
    grad_x = grad_weight = grad_bias = None
    weight = None if kept.weight is None else widen(kept.weight)
    if wanted[0]:
        grad_x = grad_out.new_empty((ring.ranks * grad_out.shape[0], *grad_out.shape[1:-1], kept.k))
        outs = _split(grad_x, ring.ranks)
    if wanted[1]:
        assert kept.x is not None
        grad_weight, xs = _weight_sum(kept, n, grad_out), _split(kept.x, ring.ranks)
    if wanted[2]:
        # Added up in the order of the ranks, not of the ring: so every rank has the same bits.
        grad_bias = grad_out.new_empty((ring.ranks, n), dtype=total)
    for rank, block in blocks(ring, _flat(grad_out)):
        if grad_x is not None:
            assert weight is not None
            linear(outs[rank], block, weight, None)
        if grad_weight is not None:
            product(grad_weight, widen(block).t(), widen(xs[rank]), accumulate=True)
        if grad_bias is not None:
            grad_bias[rank] = block.sum(0, dtype=total)
    return _finished(kept, grad_x, grad_weight, None if grad_bias is None else grad_bias.sum(0))


def _scatter_fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    shape = (grad_out.shape[0] * kept.ring.ranks, *grad_out.shape[1:-1], kept.k)
    return _fake_gradients(kept, grad_out, wanted, shape)


SCATTERED = Operator(
    SCATTER,
    op=SCATTER,
    forward=_scatter_forward,
    fake=_scatter_fake,
    save=_save,
    gradients=_scatter_gradients,
    fake_gradients=_scatter_fake_gradients,
    differentiable=("x", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)
