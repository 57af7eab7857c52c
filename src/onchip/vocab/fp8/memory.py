"""Chunks and memory for precision='fp8'.  Imports no framework."""

from collections.abc import Callable, Iterator

from onchip.core.sizes import DTYPE_BYTES, LOSS_DTYPE_BYTES
from onchip.fp8.numbers import BLOCK, block_quantized_bytes, blocks, quantized_bytes, up
from onchip.vocab.chunks import Planner, even_chunk, largest
from onchip.vocab.memory import Problem

DEFAULT_CHUNK = 2048
"""How many tokens' logits exist at once, unless a budget says otherwise: a multiple of 128, which share a scale."""

TERMS = 6
"""How many numbers per token the gradient of its logits is made from."""


def kept_parts(p: Problem) -> dict[str, int]:
    """Bytes that live from forward to backward, part by part, in addition to hidden, the target and the weight's
    copies.
    """
    return {
        "softmax gradient, transposed, in FP8": quantized_bytes(p.vocab, p.tokens) if p.grad_weight else 0,
        "hidden gradient in float32": 4 * p.tokens * p.hidden if p.grad_hidden else 0,
        "bias gradient in float32": 4 * p.vocab if p.grad_bias else 0,
    }


def weight_bytes(p: Problem) -> int:
    """Bytes of the weight's copies in FP8, in forward: for the logits, and transposed for hidden's gradient."""
    turned = block_quantized_bytes(p.hidden, p.vocab) if p.grad_hidden else 0
    return block_quantized_bytes(p.vocab, p.hidden) + turned


def chunk_parts(p: Problem, chunk: int) -> dict[str, int]:
    """Bytes of the buffers of one chunk of tokens, in forward."""
    gradient = quantized_bytes(chunk, p.vocab) + 4 * chunk * p.hidden if p.grad_hidden else 0
    parts = {
        "logits in bfloat16": 2 * chunk * p.vocab,
        "hidden states, masked": DTYPE_BYTES[p.dtype] * chunk * p.hidden,
        "hidden states in FP8": quantized_bytes(chunk, p.hidden),
        "softmax gradient in FP8 and its product": gradient,
        "bias gradient of each 128 tokens": 4 * blocks(chunk) * p.vocab if p.grad_bias else 0,
        # Sorted, with numbers of their own, and where those of each 128 entries begin.
        "ids of soft labels": chunk * (80 * p.ids + 16 * (blocks(p.vocab) + 1)) if p.ids else 0,
        "label rows": LOSS_DTYPE_BYTES[p.labels] * chunk * p.vocab if p.gathered else 0,
    }
    if p.device == "cpu":  # PyTorch's own operations, in float32
        beside = p.softcap + (p.stats or (p.class_weight and p.smoothing > 0)) + 2 * (p.labels != "")
        parts["logits and their gradient in float32"] = 4 * (5 + beside) * chunk * up(p.vocab)
        parts["operands and products in float32"] = 3 << 26
    return parts


def backward_parts(p: Problem) -> dict[str, int]:
    """Bytes of backward in addition to what is kept."""
    element = DTYPE_BYTES[p.dtype] + (4 if p.per_token_loss else 0)  # times the upstream gradients, in float32
    added_after = p.weight_grad_out and (p.vocab % 4 or p.hidden % 4)  # of other sizes cuBLAS adds in the product
    parts = {
        "hidden states, masked": element * p.tokens * p.hidden,
        "hidden states, transposed, in FP8": p.hidden * up(p.tokens),
        "weight gradient in float32": 4 * p.vocab * p.hidden if added_after else 0,
    }
    if not p.grad_weight:
        parts.clear()
    if p.sharded and p.grad_hidden:
        parts["hidden gradient in float32, summed over ranks"] = 4 * p.tokens * p.hidden
    return parts


def scratch_parts(p: Problem, chunk: int) -> dict[str, int]:
    """Peak memory above inputs, loss and returned gradients, in bytes, part by part."""
    fixed = {"weight in FP8": weight_bytes(p), **kept_parts(p), "vectors": (64 + 4 * TERMS + 20 * p.ids) * p.tokens}
    fixed |= {"copies of strided inputs": p.copied}
    # One after the other: the chunks of forward, and backward.
    return fixed | max((chunk_parts(p, chunk), backward_parts(p)), key=lambda phase: sum(phase.values()))


def _candidates(p: Problem, strategy: str, budget: int) -> Iterator[int]:
    """Tokens in a chunk: the most that fit, in even chunks of multiples of 128."""
    most = max(up(p.tokens), BLOCK)
    yield even_chunk(most, largest(lambda chunk: scratch_bytes(p, chunk) <= budget, BLOCK, most, BLOCK), BLOCK)


PLANNER: Planner[int] = Planner(
    scratch_parts,
    _candidates,
    cost=lambda p, chunk: 0,
    least=lambda p, strategy: scratch_bytes(p, BLOCK),
    default=lambda p, strategy: scratch_bytes(p, DEFAULT_CHUNK),
    needs=lambda p, strategy: f"T={p.tokens}, H={p.hidden}, V={p.vocab} with precision='fp8': the smallest chunk needs",
    advice="raise scratch_bytes or take precision='full'",
)
scratch_bytes: Callable[[Problem, int], int] = PLANNER.scratch_bytes


def plan(p: Problem, budget: int | None, ranks: int = 1) -> int:
    """Tokens in a chunk: by default at most 2048 times the ranks over which the vocabulary is sharded, in even chunks.
    Raises ValueError if the budget is too small.
    """
    if budget is None:
        most = max(up(p.tokens), BLOCK)
        return even_chunk(most, DEFAULT_CHUNK * ranks, BLOCK)
    return PLANNER.plan(p, "", budget)
