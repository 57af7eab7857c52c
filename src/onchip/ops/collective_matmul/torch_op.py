"""all_gather_matmul and matmul_reduce_scatter for PyTorch: the public functions.

Each function checks its inputs without reading a value, chooses a backend and products, and calls its operator, of
torch_call.py.  What moves blocks is in `onchip.collectives`: `torch_ring`, `torch_collective`, and between GPUs that
map each other's memory `torch_symmetric`; the maths is in the package's docstring.
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from onchip.collectives import torch_symmetric as symmetric
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
        backend: "auto" takes "collective" on GPUs, and on the CPU and in FP8 "ring".
            "symmetric" is for bfloat16, float16 and FP8 on GPUs of one host that map each other's memory: copy engines
            push pieces of blocks, and a Triton kernel's tiles begin when their rows are there; in FP8 a block's product
            begins when the block is there.  "collective" is one all-gather or reduce-scatter of the group's and one
            product, "ring" an exchange for each block.
        precision: "full", or "fp8": products of blockwise FP8 numbers, each rank's those of `fp8_linear`.  x and the
            output's gradient travel quantised, with their scales, and partial sums in float32.  With several ranks T/n,
            with all leading dimensions, is a multiple of 128.  Not by "collective", with keep_gathered or in float64.
        reduce_dtype: in what sums over ranks travel: None, float32, or x's dtype, which halves their bytes for 16 bits
            and rounds each rank's addend once more.  With precision="fp8" it is float32.

    Returns:
        [T, N], or [T, ..., N], of x's dtype, under autocast of autocast's, to which x, weight and bias are cast first.
        Gradients have the dtypes of their inputs, and x_shard's is summed over the ranks.  Sums are in float32 and
        rounded once, those over ranks too: unless `reduce_dtype` says otherwise, partial sums travel in float32.  Each
        is added up in the same order every time.

    Raises:
        TypeError: an argument of the wrong type or dtype, or no process group.
        ValueError: a wrong shape, device or option; a group without what moves x's device; and, where it is compared,
            a call that differs between ranks.  Where it isn't, such a call ends with the group's timeout, or worse.
        RuntimeError: differentiated twice, or called inside a torch.func transform; or, of backend "symmetric", in an
            earlier call a rank didn't come within the group's timeout.

    Memory of backend "ring", in numbers of x's dtype: two blocks of T/n * K (one of two ranks; none of one).  Kept for
    backward are x_shard and the weight, with keep_gathered T * K of the gathered x.  Backward has the larger of three
    float32 blocks of T/n * K, and two blocks of x with the weight's gradient in float32, N * K.  For the others see
    docs/ops/collective_matmul.md.

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

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023); of backend
    "symmetric" Wang et al., "Introducing Async Tensor Parallelism in PyTorch" (2024).
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
        weight_grad_out, check_inputs, backend, precision, reduce_dtype: as in `all_gather_matmul`.

    Returns:
        [T/n, N], or [T/n, ..., N], of x's dtype, under autocast of autocast's.  The sum over ranks is in float32 and
        rounded once: partial sums travel in float32, unless `reduce_dtype` says otherwise.  The addends of rank r's
        tokens are added in the order r + 1, r + 2, ..., r, with "collective" in the collective's, so the same inputs
        give the same bits.  Gradients have the dtypes of their
        inputs.  That of bias is the whole one, of all tokens, with the same bits on every rank: don't reduce it again.

    Raises:
        TypeError, ValueError, RuntimeError: as `all_gather_matmul`; ValueError also for a T that isn't a multiple of n.

    Memory of backend "ring": three float32 blocks of T/n * N numbers (one of one rank).  Kept for backward are x and
    the weight.  Backward has two blocks of T/n * N of x's dtype, and the weight's gradient in float32, N * K.  For the
    others see docs/ops/collective_matmul.md.

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

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023); of backend
    "symmetric" Wang et al., "Introducing Async Tensor Parallelism in PyTorch" (2024).
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
    """What both functions do; `named` are x, weight and bias."""
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
    else:  # x and weight are quantised as they are
        _check_fp8(op, x, sizes, keep_gathered, sums)
        products = choose_backend(op, "auto", refusals(x.device))
        of_x, of_weight = (
            PeerCopies(*copies_of(op, a, SCALE, products, by_block=by_block, wanted=other if needs else None))
            for a, by_block, other, needs in ((x, False, "weight", grads[1]), (weight, True, "x", grads[0]))
        )
    # One rank has nobody to differ from.
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
    of_symmetric, of_group = symmetric.refusal(ring, device, dtype, fp8=fp8), refusal(ring, device)
    if fp8:
        of_none = f"it has no precision={precision!r}; pass backend='ring' or, on GPUs of one host, 'symmetric'"
        return choose_backend(op, backend, {"ring": of_group, "symmetric": of_symmetric, "collective": of_none})
    found = {"collective": of_group, "symmetric": of_symmetric, "ring": of_group}
    return choose_backend(op, backend, found if device.type == "cuda" else dict(reversed(found.items())))


def _sums(op: str, reduce_dtype: Any, dtype: torch.dtype) -> torch.dtype:
    """In what sums over ranks travel."""
    exact = accumulator(dtype)
    if reduce_dtype is None or reduce_dtype in (exact, dtype):
        return reduce_dtype or exact
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(f"{op}: reduce_dtype must be a torch.dtype, or None; got {type(reduce_dtype).__name__}")
    raise ValueError(f"{op}: reduce_dtype must be None, {exact} or x's dtype, {dtype}; got {reduce_dtype}")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.detach().to(dtype)


def _check_fp8(op: str, x: Tensor, sizes: CollectiveSizes, keep_gathered: bool, sums: torch.dtype) -> None:
    """Raise for what precision='fp8' can't do."""
    if x.dtype == torch.float64:
        raise TypeError(f"{op}: precision='fp8' takes float32, bfloat16 or float16; got float64")
    if keep_gathered:
        raise ValueError(f"{op}: precision='fp8' keeps x in FP8 and gathers it again; pass keep_gathered=False")
    if sums != torch.float32:
        raise ValueError(f"{op}: with precision='fp8' sums over ranks travel in float32; leave reduce_dtype out")
    if sizes.ranks > 1 and sizes.rows % BLOCK != 0:
        raise ValueError(
            f"{op}: with precision='fp8' {BLOCK} tokens share a scale in the weight's gradient, and each of the "
            f"{sizes.ranks} ranks has {sizes.rows}; pad each one's tokens by {-sizes.rows % BLOCK}, and leave out what "
            "comes of them"
        )
