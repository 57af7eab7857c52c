"""all_gather_matmul and matmul_reduce_scatter for PyTorch: the public functions.

Each function checks its inputs without reading a value, chooses a backend and products, and calls its operator in
torch_call.py.  `onchip.collectives` moves the blocks: `torch_ring`, `torch_collective` and, between GPUs that map each
other's memory, `torch_symmetric`.  The package's docstring has the maths.
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from onchip.collectives import torch_buffers
from onchip.collectives.problem import GATHER, SCATTER, CollectiveSizes, check_shapes
from onchip.collectives.torch_ring import ProcessRing, refusal, ring_of
from onchip.core.backends import choose_backend
from onchip.fp8.numbers import BLOCK
from onchip.fp8.torch_operands import copies_of
from onchip.fp8.torch_products import refusals
from onchip.frontend.options import require_bool, require_one_of, shapes_of
from onchip.frontend.torch_inputs import (
    LOSS_DTYPES,
    accumulator,
    check_kinds,
    check_weight_grad_out,
    one_dtype,
    require_tensors,
)
from onchip.frontend.torch_register import needed
from onchip.ops.collective_matmul.torch_call import OPERATORS, CollectiveCall, PeerCopies
from onchip.ops.collective_matmul.torch_products import SCALE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Best first on GPUs: the order in which "auto" asks them.  On the CPU it takes the ring.
BACKENDS = ("collective", "symmetric", "ring")
Backend = Literal["auto", "symmetric", "collective", "ring"]
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
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""The tokens of all ranks times this rank's weight; each block is multiplied while the next one arrives.

    With x_r the `x_shard` of rank r, of n ranks::

        out = cat([x_0, ..., x_{n-1}]) @ weight.T + bias

    It is a column-parallel linear layer after a sequence-parallel one.  Backward sends the gradient of x's blocks
    around the ring, as `matmul_reduce_scatter` does, and gathers x again for the weight's gradient.

    Args:
        x_shard: [T/n, K] or [T/n, ..., K], this rank's tokens: float32, bfloat16, float16, on the CPU float64 too; of
            the same shape on every rank.  The first dimension is gathered.
        weight: [N, K], this rank's own, of x's dtype, any strides.  N may differ from rank to rank.
        group: the ranks; blocks are concatenated in their order.  None for all processes.
        bias: [N] of x's dtype, this rank's own.
        keep_gathered: keep the gathered x until backward, instead of gathering it again.
        weight_grad_out: [N, K] float32, contiguous: backward adds the weight's gradient to it, and leaves weight.grad
            alone.  Use it to accumulate a float32 main gradient over micro-batches.
        check_inputs: compare shapes, dtypes and options between ranks on the GPU too, and in `matmul_reduce_scatter`
            the bias, forward and backward.  This waits for the device.  On the CPU they are always compared.
        backend: "collective" is one all-gather or reduce-scatter of the group and one product.  "ring" is an exchange
            for each block.  "symmetric" is for bfloat16, float16 and FP8 on GPUs of one host that map each other's
            memory: copy engines push pieces of blocks, and a Triton kernel's tiles begin when their rows are there; in
            FP8 a block's product begins when the block is there.  "auto" takes "collective" on GPUs, and "ring" on the
            CPU and in FP8.
        precision: "full", or "fp8": products of blockwise FP8 numbers, computed on each rank as by `fp8_linear`.  x and
            the output's gradient travel quantised, with their scales, and partial sums travel in float32.  With several
            ranks, the number of a rank's tokens must be a multiple of 128.  Not available with "collective",
            keep_gathered or float64.
        reduce_dtype: the dtype in which sums travel between ranks: None or float32 (for float64 inputs float64), or x's
            dtype, which halves the bytes of 16-bit inputs and rounds each rank's addend once more.  With
            precision="fp8" it is float32.

    Returns:
        [T, N] or [T, ..., N] of x's dtype.  Under autocast x, weight and bias are cast to its dtype first, which is
        then the result's.  Gradients have the dtypes of their inputs, and x_shard's is summed over the ranks.  Sums are
        in float32 and rounded once.  So are sums over ranks: partial sums travel in float32, unless `reduce_dtype` says
        otherwise.  Each sum is added up in the same order every time.

    Raises:
        TypeError: an argument has the wrong type or dtype, or there is no process group.
        ValueError: a shape, device or option is wrong; the group can't communicate from x's device; or the call differs
            between ranks, where ranks compare it.  Where they don't, such a call runs into the group's timeout, or
            returns wrong numbers.
        RuntimeError: the result is differentiated twice, the call is inside a torch.func transform, or, with backend
            "symmetric", a rank missed an earlier call for longer than the group's timeout.

    Memory of backend "ring", in numbers of x's dtype: two blocks of T/n * K (one for two ranks; none for one).  x_shard
    and the weight are kept for backward; with keep_gathered the gathered x, T * K, instead of x_shard.  Backward needs
    the larger of these two: three float32 blocks of T/n * K; or two blocks of x and the weight's gradient in float32,
    N * K.  For the other backends see docs/ops/collective_matmul.md.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from onchip.torch import all_gather_matmul
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
        >>> out = all_gather_matmul(x, weight, None)
        >>> torch.testing.assert_close(out, x @ weight.T)  # for one rank
        >>> out.sum().backward()
        >>> dist.destroy_process_group()

    Sources: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023); for
    backend "symmetric" Wang et al., "Introducing Async Tensor Parallelism in PyTorch" (2024).
    """
    require_bool(GATHER, "keep_gathered", keep_gathered)
    named = {"x_shard": x_shard, "weight": weight, "bias": bias}
    return _run(GATHER, named, group, weight_grad_out, check_inputs, backend, precision, reduce_dtype, keep_gathered)


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
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""The sum of all ranks' products, of which each rank gets its own tokens; sums travel while blocks are multiplied.

    With x_q and weight_q those of rank q, on rank r of n::

        out = sum over q of (x_q @ weight_q.T)[r * T/n : (r + 1) * T/n] + bias

    It is a row-parallel linear layer before a sequence-parallel one.  Backward gathers the gradient of out once, as
    `all_gather_matmul` does, for the gradients of x, weight and bias.

    Args:
        x: [T, K] or [T, ..., K], all tokens, with this rank's features: float32, bfloat16, float16, on the CPU float64
            too.  The first dimension is split; T is the same on every rank and a multiple of n.
        weight: [N, K], this rank's own, of x's dtype, any strides.  K may differ from rank to rank.
        group: the ranks; tokens are split in their order.  None for all processes.
        bias: [N] of x's dtype, the same on every rank: it is added once, to the sum.
        weight_grad_out, check_inputs, backend, precision, reduce_dtype: as in `all_gather_matmul`.

    Returns:
        [T/n, N] or [T/n, ..., N] of x's dtype (under autocast, of its dtype).  The sum over ranks is in float32 and
        rounded once: partial sums travel in float32, unless `reduce_dtype` says otherwise.  For rank r's tokens the
        addends are added in the order r + 1, r + 2, ..., r, or with "collective" in the collective's order, so that the
        same inputs give the same bits.  Gradients have the dtypes of their inputs.  The bias's gradient is that of all
        tokens, with the same bits on every rank: don't reduce it again.

    Raises:
        TypeError, ValueError, RuntimeError: as `all_gather_matmul`; ValueError also if T isn't a multiple of n.

    Memory of backend "ring": three float32 blocks of T/n * N numbers (one for one rank).  x and the weight are kept for
    backward, which needs two blocks of T/n * N numbers of x's dtype, and the weight's gradient in float32, N * K.  For
    the other backends see docs/ops/collective_matmul.md.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from onchip.torch import matmul_reduce_scatter
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
        >>> out = matmul_reduce_scatter(x, weight, None)
        >>> torch.testing.assert_close(out, x @ weight.T)  # for one rank
        >>> out.sum().backward()
        >>> dist.destroy_process_group()

    Sources: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023); for
    backend "symmetric" Wang et al., "Introducing Async Tensor Parallelism in PyTorch" (2024).
    """
    named = {"x": x, "weight": weight, "bias": bias}
    return _run(SCATTER, named, group, weight_grad_out, check_inputs, backend, precision, reduce_dtype)


def _run(
    op: str,
    named: dict[str, Any],
    group: Any,
    weight_grad_out: Any,
    check_inputs: bool,
    backend: str,
    precision: str,
    reduce_dtype: Any,
    keep_gathered: bool = False,
) -> Tensor:
    """The body of both functions; `named` are x, weight and bias."""
    require_bool(op, "check_inputs", check_inputs)
    require_one_of(op, "precision", precision, get_args(Precision))
    tensors = require_tensors(op, named, ("bias",))
    check_kinds(op, tensors, integers=(), dtypes=LOSS_DTYPES)
    ring = ring_of(op, group)
    sizes = check_shapes(op, shapes_of(tensors), ring.ranks)
    x, weight, bias = named.values()
    check_weight_grad_out(op, weight_grad_out, weight)
    dtype = one_dtype(op, tensors)
    sums = _sums(op, reduce_dtype, dtype)
    chosen = _chosen(op, backend, ring, x.device, dtype, precision)
    grads, products, of_bias = needed(x, weight, bias), "full", bias
    if precision == "full":
        of_x, of_weight = (PeerCopies(_cast(a, dtype), None, None, None) for a in (x, weight))
        of_bias = None if bias is None else _cast(bias, dtype)
    else:  # x and weight are quantised without a cast
        _check_fp8(op, x, sizes, keep_gathered, sums)
        products = choose_backend(op, "auto", refusals(x.device))
        of_x, of_weight = (
            PeerCopies(*copies_of(op, a, SCALE, products, by_block=by_block, wanted=other if needs else None))
            for a, by_block, other, needs in ((x, False, "weight", grads[1]), (weight, True, "x", grads[0]))
        )
    # With one rank there is nothing to compare.
    check = ring.ranks > 1 and (check_inputs or x.device.type == "cpu")
    ring = ring._replace(backend=chosen)
    call = CollectiveCall(
        op, x, weight, bias, of_x, of_weight, of_bias, weight_grad_out, ring, dtype, products, sums, keep_gathered,
        check, grads,
    )  # fmt: skip
    return OPERATORS[op](call).out


def _chosen(op: str, backend: str, ring: ProcessRing, device: torch.device, dtype: torch.dtype, precision: str) -> str:
    """The backend of a call."""
    fp8 = precision != "full"
    of_symmetric, of_group = torch_buffers.refusal(ring, device, dtype, fp8=fp8), refusal(ring, device)
    if fp8:
        of_none = f"it has no precision={precision!r}; pass backend='ring' or, on GPUs of one host, 'symmetric'"
        return choose_backend(op, backend, {"ring": of_group, "symmetric": of_symmetric, "collective": of_none})
    found = {"collective": of_group, "symmetric": of_symmetric, "ring": of_group}
    return choose_backend(op, backend, found if device.type == "cuda" else dict(reversed(found.items())))


def _sums(op: str, reduce_dtype: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums travel between ranks."""
    exact = accumulator(dtype)
    if reduce_dtype is None or reduce_dtype in (exact, dtype):
        return reduce_dtype or exact
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(f"{op}: reduce_dtype must be a torch.dtype, or None; got {type(reduce_dtype).__name__}")
    raise ValueError(f"{op}: reduce_dtype must be None, {exact} or x's dtype, {dtype}; got {reduce_dtype}")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.detach().to(dtype)


def _check_fp8(op: str, x: Tensor, sizes: CollectiveSizes, keep_gathered: bool, sums: torch.dtype) -> None:
    """Raise if precision='fp8' can't compute the call."""
    if x.dtype == torch.float64:
        raise TypeError(f"{op}: precision='fp8' takes float32, bfloat16 or float16; got float64")
    if keep_gathered:
        raise ValueError(f"{op}: precision='fp8' keeps x in FP8 and gathers it again; pass keep_gathered=False")
    if sums != torch.float32:
        raise ValueError(f"{op}: with precision='fp8' sums over ranks travel in float32; leave out reduce_dtype")
    if sizes.ranks > 1 and sizes.rows % BLOCK != 0:
        raise ValueError(
            f"{op}: with precision='fp8' {BLOCK} tokens share a scale in the weight's gradient, and each of the "
            f"{sizes.ranks} ranks has {sizes.rows}; pad each rank's tokens by {-sizes.rows % BLOCK}, and leave out "
            "their results"
        )
