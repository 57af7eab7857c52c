"""What operators on the Triton kernels have in common: when they can run, their plan, the memory that forward leaves
for backward, and the run.

Forward leaves what gradients need in the memory that the gradients will take: exponentials of the logits in the
weight's, the tokens' hidden states in hidden's; or, by another plan, the gradients up to factors (`Sums`).  Backward
turns these into the gradients in place; autograd clones them first if the graph is retained.
"""

import math
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.sizes import up
from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import DTYPES, copies_weight
from onchip.frontend.torch_register import Wanted
from onchip.kernels.triton.launch import describe, device_refusal, has_gluon
from onchip.vocab.memory import Problem
from onchip.vocab.rows.launches import flat as flat
from onchip.vocab.torch.call import Layer, LinearCall
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import planner, tiling
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.search import of_length
from onchip.vocab.triton.tiling import EXPONENTIALS_ROW, TOKEN_TILE, VOCAB_TILE

if TYPE_CHECKING:  # Triton is imported where something is launched
    from onchip.vocab.triton import records
    from onchip.vocab.triton.blocks import BufferRows


# Seconds of a cold start in which plans are made for other numbers of tokens.
PLANNING = 0.05


def product_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [V, H] in the products' dtype, as kernels can read it."""
    if copies_weight(weight, dtype):
        return stated.call(Tensor.to, weight, dtype, memory_format=torch.contiguous_format).contiguous()
    return weight if weight.dtype == dtype else stated.call(Tensor.to, weight, dtype)


def refusal(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels can't serve a call on this device with products in `dtype`, or None."""
    reason = device_refusal(device, index, dtype)
    if reason is None and dtype not in (torch.bfloat16, torch.float16):
        reason = f"its products take bfloat16 or float16, not {DTYPES[dtype]}"
    return reason


def problem_of(layer: Layer) -> Any:
    """The problem of a call, made once."""
    made = vars(layer).get("made_problem")
    if made is None:
        made = vars(layer)["made_problem"] = layer.problem("cuda")
    return made


def plan(call: LinearCall) -> TritonPlan:
    """The plan for a call, or for a fake one, whose sizes may be symbols.

    A call that torch.compile traced without a budget gets a plan that needs no numbers; a budget turns the symbols into
    numbers, and needs a graph for each.
    """
    made: TritonPlan | None = vars(call).get("made_plan")  # what backward keeps of a call is asked for after forward
    if made is None:
        made = vars(call)["made_plan"] = _plan(call)
    return made


def _problem(call: LinearCall) -> Problem:
    """What is planned for."""
    problem: Problem = problem_of(call)
    if changed := {name: x for name, x in call.of_kernels.items() if x != getattr(problem, name)}:
        problem = replace(problem, **changed)
    if call.shards.most:  # each rank makes the plan of the one with the most rows
        problem = replace(problem, vocab=call.shards.most)
    return problem


def plan_ahead(call: LinearCall) -> None:
    """Make plans for other numbers of tokens, the nearest first, as long as that takes a small part of a cold start."""
    if call.budget is not None:
        return
    problem, end = _problem(call), time.perf_counter() + PLANNING
    whole = up(problem.tokens, TOKEN_TILE)
    for step in range(TOKEN_TILE, 2 * whole, TOKEN_TILE):
        for tokens in (whole + step, whole - step):
            if tokens > whole // 3:
                planner.plan(of_length(problem, tokens), call.options.strategy)
        if time.perf_counter() > end:
            return


def _plan(call: LinearCall) -> TritonPlan:
    problem = _problem(call)
    if call.compiled and call.budget is None:
        return planner.plan_for_symbols(problem, call.options.strategy)
    if call.compiled or any(isinstance(x, torch.SymInt) for x in (problem.tokens, problem.hidden, problem.vocab)):
        problem = replace(
            problem,
            tokens=int(problem.tokens),
            hidden=int(problem.hidden),
            vocab=int(problem.vocab),
            ids=int(problem.ids),
            copied=int(problem.copied),
        )
    return planner.plan(problem, call.options.strategy, call.budget)


# ------------------------------------------------------------------------------------------------------------- memory


class TritonSaved(NamedTuple):
    """What forward leaves for backward; see walks.py.  If no gradient is wanted, everything but the vectors is
    empty.
    """

    hidden_memory: Tensor  # of hidden's gradient: the hidden states by position
    weight_memory: Tensor  # of weight's gradient and a chunk more, [rows, H]: exponentials
    scratch_memory: Tensor  # more of them
    vectors: Tensor  # `Vectors.packed`
    weight: Tensor  # in the products' dtype, as kernels can read it, if that is a copy that is kept; else empty


def make_saved(layer: Layer, config: TritonPlan, *, keep_weight: bool = True, fake: bool = False) -> TritonSaved:
    """The tensors of `TritonSaved`; all but the weight's copy are not yet filled."""
    hidden, weight = layer.hidden, layer.weight
    tiles = -(-weight.shape[0] // VOCAB_TILE)
    vectors = stated.empty(triton_spec.vector_elements(layer.number), torch.int32, hidden.device)

    def blank() -> Tensor:
        return stated.empty(0, layer.dtype, hidden.device)

    if not any(layer.grads):
        return TritonSaved(blank(), blank(), blank(), vectors, blank())
    make = empty if fake else aligned
    if config.in_forward:
        problem = problem_of(layer)
        size = triton_spec.hidden_digits(problem) + triton_spec.sum_in_scratch(problem)
        size += triton_spec.digits_beyond(problem, config)
        gradient = layer.grads[1] and not problem.weight_grad_out
        rows = weight.shape[0] + triton_spec.rows_beyond(problem, config)
        hidden_memory = stated.empty(hidden.shape, hidden.dtype, hidden.device) if layer.grads[0] else blank()
        weight_memory = make(weight, (rows, weight.shape[1]), weight.dtype) if gradient else blank()
        digits = make(hidden, (-(-size // layer.dtype.itemsize),), layer.dtype, (weight_memory,))
        return TritonSaved(hidden_memory, weight_memory, digits, vectors, blank())
    weight_memory = blank()
    # A number, unless torch.compile made it a symbol: then some tokens may be kept there.
    if not (isinstance(config.kept_in_gradient, int) and config.kept_in_gradient == 0):
        # A chunk more than the gradient takes: each chunk of the gradient overwrites the previous chunk's exponentials
        # while reading its own.
        weight_memory = make(weight, (tiles * VOCAB_TILE + config.weight_chunk, weight.shape[1]), weight.dtype)
    # Backward needs the copy too, which takes an H100 2% of a step under autocast; who recomputes wants nothing kept.
    keeps = keep_weight and not (isinstance(config.kept, int) and config.kept == 0)
    copy = product_weight(weight, layer.dtype) if keeps else weight
    return TritonSaved(
        stated.empty(hidden.shape, hidden.dtype if layer.grads[0] else layer.dtype, hidden.device),
        weight_memory,
        make(hidden, (VOCAB_TILE * tiles * config.kept_in_scratch,), layer.dtype, (weight_memory,)),
        vectors,
        blank() if copy is weight else copy,
    )


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, others: Sequence[Tensor] = ()) -> Tensor:
    """Memory not yet filled."""
    return stated.empty(shape, dtype, like.device)


def aligned(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, others: Sequence[Tensor] = ()) -> Tensor:
    """Memory not yet filled, which begins at a whole row of exponentials, 512 bytes, and is near the others.

    PyTorch's allocator gives such memory; CUDA's own, without caching, and pluggable ones give multiples of 256.  While
    a call is listed for another framework nothing has an address: the memory is in the storage of the others then,
    after the last, where the next that is made with the same others is too.
    """
    size = math.prod(shape) * dtype.itemsize
    if stated.listed_device() is not None and size and any(x.numel() for x in others):
        return _behind(others, size).view(dtype).view(shape)
    memory = _allocate(like, shape, dtype)
    if memory.data_ptr() % EXPONENTIALS_ROW == 0:
        return memory
    spare = _allocate(like, (size + EXPONENTIALS_ROW,), torch.uint8)
    return spare[-spare.data_ptr() % EXPONENTIALS_ROW :][:size].view(dtype).view(shape)


def _behind(others: Sequence[Tensor], size: int) -> Tensor:
    """So many bytes behind the last of the others, in a storage that isn't memory and grows for it."""
    last = max((x for x in others if x.numel()), key=Tensor.data_ptr)
    storage, start = last.untyped_storage(), up(last.data_ptr() + last.nbytes, EXPONENTIALS_ROW)
    storage.resize_(max(storage.nbytes(), start + size))
    return last.view(torch.uint8).as_strided((size,), (1,), start)


def _allocate(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory not yet filled; on the CPU, for the interpreter, it has pages of its own."""
    if like.device.type != "cpu":
        return stated.empty(shape, dtype, like.device)
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.uint8)[:size].view(dtype).view(shape)


class TokenChunk(NamedTuple):
    """Memory for a chunk of tokens whose gradients forward computes."""

    rows: Tensor  # [tokens, H]
    buffer: "records.LogitBuffer"
    work: Tensor  # bytes: of what the softmax leaves for each tile, then of hidden's gradient by position, in float32
    normalizer: Tensor  # [tokens] float32, by position
    left: "Sums"  # of all chunks
    weight_tiles: int  # tiles of the vocabulary whose weight gradient is made at a time
    hidden_step: int  # positions whose hidden gradient is

    @staticmethod
    def empty(layer: Layer, config: TritonPlan, saved: TritonSaved, tokens: int, *, first: bool) -> "TokenChunk":
        """For at most `tokens` tokens; `first`: memory for the first chunk."""
        hidden, size, problem = layer.hidden, layer.hidden.shape[-1], problem_of(layer)
        vocab, left = up(layer.weight.shape[0], VOCAB_TILE), Sums.of(layer, saved)
        in_gradient = triton_spec.in_gradient(problem, config, tokens, first=first)
        in_digits = triton_spec.in_digits(problem, config, tokens, first=first)
        in_scratch = up(tokens, TOKEN_TILE) - in_gradient - in_digits
        weight_tiles = vocab // VOCAB_TILE
        beside = stated.empty(0, layer.dtype, hidden.device)
        shift, stride = 0, in_gradient
        if in_gradient:
            beside = saved.weight_memory.view(-1).view(layer.dtype)
            if config.first_chunk:
                weight_tiles = config.weight_chunk // VOCAB_TILE
                shift, stride = weight_tiles * size, size
            else:
                beside = beside[triton_spec.sum_bytes(problem) // 2 :][: vocab * in_gradient]
        kept = (saved.weight_memory, saved.scratch_memory) if layer.grads[1] or in_digits else ()
        scratch = aligned(hidden, (vocab * in_scratch,), layer.dtype, kept) if in_scratch else beside[:0]
        third = beside[:0]
        if in_digits:
            # At the end: so each chunk of the digits overwrites the previous chunk's exponentials at most.
            memory = saved.scratch_memory[triton_spec.hidden_digits(problem) // layer.dtype.itemsize :]
            third = memory[len(memory) - vocab * in_digits :]
        needed = triton_spec.work_bytes(problem, config, tokens, first=first)
        work = saved.weight_memory[: config.weight_chunk] if first else saved.weight_memory[layer.weight.shape[0] :]
        if triton_spec.lent(problem, config, first=first) < needed:
            work = stated.empty(needed, torch.uint8, hidden.device)
        step = triton_spec.hidden_step(problem, config, tokens, first=first) if layer.grads[0] else tokens
        return TokenChunk(
            stated.empty((tokens, size), layer.dtype, hidden.device),
            _spanning(
                (beside, scratch, third),
                shift=shift,
                stride=stride,
                tiles=(in_gradient, in_scratch, in_digits),
                kept=in_gradient + in_scratch + in_digits,
            ),
            work.view(-1).view(torch.uint8),
            stated.empty(tokens, torch.float32, hidden.device),
            left,
            weight_tiles,
            step,
        )


class Sums(NamedTuple):
    """What forward leaves of gradients that it computed up to factors, in the memory of `TritonSaved`."""

    hidden: "records.Sum"  # [T, H], by token
    weight: "records.Sum"  # [V, H]

    @staticmethod
    def of(layer: Layer, saved: TritonSaved) -> "Sums":
        from onchip.vocab.triton.records import Sum

        problem, scratch = problem_of(layer), saved.scratch_memory.view(torch.uint8)
        shape, in_scratch = layer.weight.shape, triton_spec.sum_in_scratch(problem)
        hidden, weight = Sum(saved.hidden_memory), Sum(saved.weight_memory)
        if layer.grads[0]:
            hidden = Sum(saved.hidden_memory.view(-1, shape[1]))
        if size := triton_spec.hidden_digits(problem):
            digits, scratch = scratch[: hidden.first.numel()], scratch[size:]
            hidden = Sum(hidden.first.view(torch.int16), digits.view(hidden.first.shape))
        if layer.grads[1]:
            of_first, of_digits = 2 * shape[0] * shape[1], triton_spec.weight_digits(problem)
            memory = scratch if problem.weight_grad_out else saved.weight_memory.view(-1).view(torch.uint8)
            # A 16-bit gradient has no room for the digits.
            digits = scratch if in_scratch == of_digits else memory[of_first:]
            weight = Sum(memory[:of_first].view(torch.int16).view(shape), digits[:of_digits].view(-1, shape[1]))
        return Sums(hidden, weight)


def position_rows(layer: Layer, saved: TritonSaved) -> Tensor:
    """[T, H] in the products' dtype, in the memory of hidden's gradient."""
    flat_memory = saved.hidden_memory.view(-1).view(layer.dtype)
    return flat_memory[: layer.hidden.numel()].view(-1, layer.hidden.shape[-1])


def logit_buffer(layer: Layer, config: TritonPlan, saved: TritonSaved, recomputed: int = 0) -> "records.LogitBuffer":
    """The memory for exponentials, with more for those of so many tokens that backward recomputes."""
    nothing = saved.scratch_memory[:0]
    weight_grad = saved.weight_memory.view(-1).view(layer.dtype) if config.kept_in_gradient > 0 else nothing
    scratch = saved.scratch_memory
    kept, rows = (saved.weight_memory, scratch), (recomputed * config.vocab_chunk,)
    again = aligned(nothing, rows, layer.dtype, kept) if recomputed else nothing
    stride = layer.weight.shape[1] * layer.weight.element_size() // layer.dtype.itemsize
    return _spanning(
        (weight_grad, scratch, again),
        shift=config.weight_chunk // VOCAB_TILE * stride,
        stride=stride,
        tiles=(config.kept_in_gradient, config.kept_in_scratch, recomputed),
        kept=config.kept,
    )


def _spanning(
    given: tuple[Tensor, Tensor, Tensor], *, shift: int = 0, stride: int, tiles: tuple[int, int, int], kept: int
) -> "records.LogitBuffer":
    """The buffer in these pieces: the weight's gradient, scratch, and a third one.

    shift, stride: in the first piece, rows before the first tile's, and from one tile to the next.  tiles: tokens in
    each.  kept: how many of these forward fills.
    """
    from onchip.vocab.triton.blocks import BufferRows, odd
    from onchip.vocab.triton.records import LogitBuffer

    element, addresses = given[0].itemsize, [x.data_ptr() for x in given]
    cut = tuple([x.numel() * element for x in given]), VOCAB_TILE * element, shift, stride, tiles, BufferRows, odd
    address, number, rows = _spread(cut, *addresses)
    first = next(x for x, at in zip(given, addresses, strict=True) if x.numel() and at == address)
    matrix = first.as_strided((number, VOCAB_TILE), (0, 1))
    told = stated.builder()
    if told is not None:
        told.derive(partial(_spread, cut), given, matrix, rows)
    return LogitBuffer(given, matrix, rows, kept)


_Cut = tuple[tuple[int, ...], int, int, int, tuple[int, int, int], "type[BufferRows]", Callable[[int], int]]
"""Bytes of the pieces and of a row; rows that the first piece is shifted by, and the stride in it; tiles of each."""


def _spread(cut: _Cut, *addresses: int) -> "tuple[int, int, BufferRows]":
    """Where the matrix that spans these pieces begins, how many rows it has, and which rows belong to which piece.

    Prepared calls call it too, so it imports nothing: 3.6 us instead of 5.0.
    """
    sizes, row, shift, stride, tiles, make, odd = cut
    first = min([address for address, size in zip(addresses, sizes, strict=True) if size])
    rows = (max([address + size for address, size in zip(addresses, sizes, strict=True) if size]) - first) // row
    starts = [address - first if size else 0 for address, size in zip(addresses, sizes, strict=True)]
    if [start for start in starts if start % row]:
        raise RuntimeError(
            f"memory kept for backward has been moved to an address that is no multiple of {row} bytes; leave it "
            "where it is (saved-tensor hooks move it), or pass backend='plain'"
        )
    if rows >= 1 << 30:
        raise RuntimeError(
            "device memory is spread over more than half a terabyte of addresses; pass strategy='recompute'"
        )
    weight_grad, scratch, third = [start // row for start in starts]
    return (
        first,
        rows,
        make(odd(rows), odd(weight_grad + shift), stride, tiles[0], odd(scratch), tiles[1], odd(third), tiles[2]),
    )


def rows_and_buffer(
    layer: Layer, config: TritonPlan, saved: TritonSaved
) -> "tuple[Tensor, records.LogitBuffer | None]":
    """What forward fills in: hidden states by position, and exponentials (None if none are kept)."""
    if any(layer.grads):
        return position_rows(layer, saved), logit_buffer(layer, config, saved) if config.kept > 0 else None
    shape = min(config.token_chunk, layer.number), layer.hidden.shape[-1]
    return stated.empty(shape, layer.dtype, layer.hidden.device), None


class Gradients(NamedTuple):
    """Where backward puts the gradients; None for those not wanted."""

    hidden: Tensor | None  # [T, H], what forward left
    weight: Tensor | None  # [V, H], what forward left, the caller's or new
    new_weight: Tensor | None  # the same if it is new
    bias: Tensor | None  # [V] float32
    add: bool  # to the weight's, which is the caller's

    @staticmethod
    def of(layer: Layer, saved: TritonSaved, wanted: Wanted, add_to: Tensor | None = None) -> "Gradients":
        """The gradients of `layer`, with the weight's added to `add_to` if that is given."""
        (vocab, size), weight, new, bias = layer.weight.shape, None, None, None
        if wanted[1]:
            if add_to is None and saved.weight_memory.numel() == 0:
                new = stated.empty_like(layer.weight)
            weight = next(x for x in (add_to, new, saved.weight_memory[:vocab]) if x is not None)
            if add_to is None and layer.hidden.numel() == 0:  # nothing will be launched
                stated.zero(weight)
        if wanted[2]:
            bias = stated.zeros(vocab, torch.float32, layer.weight.device)
        hidden = saved.hidden_memory.view(-1, size) if wanted[0] else None
        return Gradients(hidden, weight, new, bias, add_to is not None)

    def made(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden, weight and, in this dtype, bias that are not in memory of forward's or of the
        caller's.
        """
        return None, self.new_weight, None if self.bias is None else stated.converted(self.bias, lambda x: x.to(dtype))


def in_memory(saved: TritonSaved, weight: Tensor, made: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of hidden and weight; the weight's is the one in `made` if nothing was kept in its memory."""
    return saved.hidden_memory, saved.weight_memory[: weight.shape[0]] if saved.weight_memory.numel() > 0 else made


def clone(memory: Tensor) -> Tensor:
    """A copy for a backward pass that uses it up."""
    return stated.call(Tensor.copy_, aligned(memory, memory.shape, memory.dtype), memory)


# ---------------------------------------------------------------------------------------------------------------- run


def weight_in_backward(layer: Layer, config: TritonPlan, saved: TritonSaved) -> Tensor:
    """The weight as `make_run` takes it; if forward has computed the gradients, no products are left that need a
    copy.
    """
    return layer.weight if config.in_forward else saved.weight


def make_run(
    layer: Layer,
    options: Any,
    vectors: Tensor,
    out: Tensor | None = None,
    class_weight: Tensor | None = None,
    *,
    weight: Tensor | None = None,
) -> "records.Run":
    """A linear layer as the walks take it, with its kernels' tiles.

    `options`: those of a loss.  `vectors`: `Vectors.packed`.  `out`: the caller's memory for the weight's gradient.
    `class_weight`: [V] float32, contiguous.  `weight`: that of `TritonSaved`, or of `weight_in_backward`.
    """
    from onchip.vocab.triton import records

    dtype, tokens = layer.dtype, layer.number
    if weight is None or weight.numel() == 0:
        weight = product_weight(layer.weight, dtype)
    # The bias in the products' dtype first, as F.linear does under autocast.
    bias = None if layer.bias is None else stated.converted(layer.bias, lambda x: x.to(dtype).float())
    device = describe(weight.device)
    hidden = weight.shape[1]
    tiles = _tiles(hidden, device.product_bytes, tiling.heuristic_tiles)
    rows_at = hidden, max(weight.stride())
    aligned_rows = all(x * dtype.itemsize % 16 == 0 for x in rows_at) and weight.data_ptr() % 16 == 0
    if out is not None:
        aligned_rows = aligned_rows and out.data_ptr() % 16 == 0
    unpacked = records.Vectors.unpack(vectors, tokens)
    tma = device.capability >= 90 and aligned_rows
    gluon = tma and has_gluon(device.capability)
    return records.Run(
        weight, dtype, bias, tokens, options, unpacked, tiles, device.programs, tma=tma, class_weight=class_weight,
        gluon=gluon,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _tiles(hidden: int, shared: int, heuristic: Any) -> "dict[str, records.Tiles]":
    """The tiles of each kernel, chosen by the function `heuristic`."""
    from onchip.vocab.triton import records

    return {kernel: records.Tiles(**numbers) for kernel, numbers in heuristic(shared, hidden).items()}
