"""What operators on the Triton kernels have in common: the memory that forward leaves for backward, and the run.

Forward leaves what gradients need in the memory that they will take: exponentials of the logits in the weight's, the
tokens' hidden states in hidden's.  Backward turns these into the gradients, in place; autograd clones them first where
the graph is retained.
"""

import math
import mmap
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from onchip.core import configs
from onchip.core.sizes import DTYPE_BYTES
from onchip.frontend.torch_autograd import graph_is_kept
from onchip.frontend.torch_inputs import DTYPES, copies_weight
from onchip.vocab.torch.tiles import Head
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton.memory import TritonConfig

if TYPE_CHECKING:  # Triton is imported where something is launched
    from onchip.vocab.triton import launches

# Stored under the name of the op that was tuned first.
_CONFIGS = "linear_cross_entropy"


def flat(x: Tensor | None) -> Tensor | None:
    """[...] as [T] float32."""
    return None if x is None else x.reshape(-1).to(torch.float32).contiguous()


def product_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[V, H] in the products' dtype, as kernels can read it."""
    if copies_weight(weight, dtype):
        return weight.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return weight.to(dtype)


# ------------------------------------------------------------------------------------------------------------- memory


class Saved(NamedTuple):
    """What forward leaves for backward; see walks.py."""

    hidden_memory: Tensor  # of hidden's gradient: the hidden states by position
    weight_memory: Tensor  # of weight's gradient and a chunk more, [rows, H]: exponentials
    overflow: Tensor  # more of them
    vectors: Tensor


def make_saved(
    hidden: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    config: TritonConfig,
    tokens: int,
    *,
    grad_hidden: bool,
    any_grad: bool,
    fake: bool = False,
) -> Saved:
    """The tensors of `Saved`, not yet filled."""
    vocab, size = weight.shape
    tiles = -(-vocab // triton_spec.VOCAB_TILE)

    def blank() -> Tensor:
        return hidden.new_empty(0, dtype=dtype)

    if not any_grad:
        return Saved(blank(), blank(), blank(), hidden.new_empty(0, dtype=torch.int32))
    in_place = triton_spec.may_hold_any(config.stashed)
    make = empty if fake else aligned
    return Saved(
        hidden.new_empty(hidden.shape, dtype=hidden.dtype if grad_hidden else dtype),
        # A chunk more than the gradient takes: each chunk of the gradient overwrites the previous chunk's exponentials
        # while reading its own.
        make(weight, (tiles * triton_spec.VOCAB_TILE + config.weight_chunk, size), weight.dtype)
        if in_place
        else blank(),
        make(hidden, (triton_spec.VOCAB_TILE * tiles * config.overflow,), dtype),
        hidden.new_empty(triton_spec.vector_elements(tokens), dtype=torch.int32),
    )


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Not yet filled."""
    return like.new_empty(shape, dtype=dtype)


_MULTIPLE = 2 * triton_spec.VOCAB_TILE  # bytes of a row of exponentials


def aligned(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Not yet filled, from a multiple of 512 bytes on and near the others.

    PyTorch's allocator gives such memory; CUDA's own, without caching, and pluggable ones give multiples of 256.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = _allocate(like, size)
    if memory.data_ptr() % _MULTIPLE:
        memory = _allocate(like, size + _MULTIPLE)
        memory = memory[-memory.data_ptr() % _MULTIPLE :]
    return memory[:size].view(dtype).view(shape)


def _allocate(like: Tensor, size: int) -> Tensor:
    """So many bytes; the CPU's, for the interpreter, are pages of their own."""
    if like.device.type != "cpu":
        return like.new_empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.uint8)


def rows_in(memory: Tensor, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """[T, H] of the products' dtype in the memory of hidden's gradient."""
    return memory.view(-1).view(dtype)[: tokens * hidden].view(tokens, hidden)


def logit_buffer(
    saved: Saved, weight: Tensor, dtype: torch.dtype, config: TritonConfig, *, recomputed: int | None = None
) -> "launches.LogitBuffer":
    """The memory for exponentials; with `recomputed` also for those of so many tokens that backward recomputes."""
    from onchip.vocab.triton import launches

    nothing = saved.overflow[:0]
    for_recomputed = nothing
    if recomputed is not None:
        for_recomputed = aligned(saved.vectors, (max(0, recomputed) * config.vocab_chunk,), dtype)
    return launches.logit_buffer(
        saved.weight_memory.view(-1).view(dtype) if config.stashed > 0 else nothing,
        config.weight_chunk // triton_spec.VOCAB_TILE,
        weight.shape[1] * weight.element_size() // dtype.itemsize,
        config.stashed,
        saved.overflow,
        config.overflow,
        for_recomputed,
        recomputed or 0,
    )


def memory_for_backward(saved: Saved, weight: Tensor, *, grad_weight: bool) -> tuple[Tensor, Tensor]:
    """The memory of hidden's and weight's gradients for backward to use up: clones of it where the graph is retained,
    and where nothing was kept in weight's, memory for its gradient.
    """
    hidden_memory, weight_memory, _, _ = saved
    kept = graph_is_kept()
    if kept:
        hidden_memory = hidden_memory.clone()
    if grad_weight and weight_memory.numel() == 0:
        weight_memory = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    elif kept:
        weight_memory = aligned(weight_memory, weight_memory.shape, weight_memory.dtype).copy_(weight_memory)
    return hidden_memory, weight_memory


# ---------------------------------------------------------------------------------------------------------------- run


@lru_cache(maxsize=64)
def _device(index: int) -> tuple[str, int, int, tuple[int, int]]:
    """Slug, multiprocessors, shared memory per block in bytes, and compute capability."""
    p = torch.cuda.get_device_properties(index)
    return (
        configs.device_slug(p.name),
        p.multi_processor_count,
        p.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        (p.major, p.minor),
    )


def make_run(head: Head, tokens: int, out: Tensor | None = None) -> "launches.Run":
    """The call as the walks take it: its head, and its kernels' tiles from the stored configs.

    `out`: memory of the caller's for the weight's gradient.
    """
    from onchip.vocab.triton import launches

    weight = head.weight
    slug, programs, shared, capability = _device(weight.device.index) if weight.is_cuda else ("", 4, 232448, (9, 0))
    sizes = {"tokens": tokens, "hidden": weight.shape[1], "vocab": weight.shape[0]}
    dtype = DTYPES[weight.dtype]
    tiles = {
        kernel: launches.Tiles(**configs.find_config(_CONFIGS, kernel, slug, dtype, sizes, default).config)
        for kernel, default in triton_spec.heuristic_tiles(shared).items()
    }
    step = 16 // DTYPE_BYTES[dtype]
    aligned_rows = all(x % step == 0 for x in (weight.shape[1], max(weight.stride()))) and weight.data_ptr() % 16 == 0
    if out is not None:
        aligned_rows = aligned_rows and out.data_ptr() % 16 == 0
    return launches.Run(head, tokens, tiles, programs, tma=capability >= (9, 0) and aligned_rows)
