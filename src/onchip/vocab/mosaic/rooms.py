"""Where exponentials are kept, and the product that makes hidden's gradient from them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.core.sizes import up
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic.head import VOCAB_TILE, MosaicPlan, hidden_slices, split_at
from onchip.vocab.mosaic.positions import Operands, Positions, after
from onchip.vocab.xla.loss import LossCall
from onchip.vocab.xla.tiles import XlaProjection

Array = jax.Array
# A float16 exponential is kept times this: without it, whatever is below 6e-8 would be lost.
_FLOAT16_EXPONENTIAL = 32768.0


class Exponentials(NamedTuple):
    """The exponentials of some positions, in order: each place holds as many as it has room for."""

    gradient: Any = None  # a `KeptBlocks`, with the weight's gradient
    digits: Any = None  # a `KeptBlocks`, with the digits of the weight's sum
    scratch: Any = None  # one without

    @staticmethod
    def of(rooms: list[Any], plan: MosaicPlan) -> "Exponentials":
        """From what `rooms_of` makes."""
        left = iter(rooms)
        tokens = plan.kept_in_gradient, plan.kept_in_digits, plan.kept_in_scratch
        return Exponentials(*(next(left) if n else None for n in tokens))

    @property
    def memory(self) -> tuple[Any, Any]:
        """The memory of the gradient, and of the digits."""
        return tuple(None if x is None else x.in_weight_grad for x in self[:2])  # type: ignore[return-value]

    def lying(self, memory: Sequence[Any]) -> "Exponentials":
        """The same exponentials, in this memory."""
        gradient, digits = (x and replace(x, in_weight_grad=y) for x, y in zip(self[:2], memory, strict=True))
        return self._replace(gradient=gradient, digits=digits)


def tiles_of(call: LossCall, tokens: int | None = None) -> dict[str, Any]:
    """The tiles of each kernel, for a weight's product of so many tokens."""
    from onchip.kernels.mosaic.product import MosaicConfig

    layer = call.source
    layout, tokens = ("vh", "hv")[layer.vocab_axis], tokens or len(layer.hidden)
    tiles = mosaic_spec.heuristic_tiles(layer.hidden.shape[1], layout, tokens)
    return {kernel.removeprefix("mosaic_"): MosaicConfig.from_numbers(config) for kernel, config in tiles.items()}


def exponential_scale(dtype: Any) -> float:
    return _FLOAT16_EXPONENTIAL if dtype == jnp.float16 else 1.0


def rooms_of(layer: XlaProjection, plan: MosaicPlan, config: Any, memory: Any) -> list[Any]:
    """Memory for exponentials, a `KeptBlocks` of each kind that the plan has: one for the positions after another's.

    memory: that of the weight's sum, a `MosaicSum`, if it is there already.
    """
    from onchip.vocab.mosaic.blocks import KeptBlocks
    from onchip.vocab.mosaic.sums import MosaicSum

    split, whole = split_at(layer.vocab, plan.chunk), up(layer.vocab, VOCAB_TILE)

    def scratch(entries: int, tokens: int) -> Array:
        shape = (entries, tokens) if layer.vocab_axis == 0 else (tokens, entries)
        empty: Array = lax.empty(shape, layer.weight.dtype)
        return empty

    of_sum = memory or MosaicSum.empty(layer.weight, config)
    rooms = [
        KeptBlocks(memory, scratch(whole - split, tokens), plan.chunk, split)
        for tokens, memory in ((plan.kept_in_gradient, of_sum.first), (plan.kept_in_digits, of_sum.digits))
        if tokens
    ]
    return [*rooms, KeptBlocks(None, scratch(whole, plan.kept_in_scratch))] if plan.kept_in_scratch else rooms


def hidden_in_slices(at: Positions, in_scratch: Any, scale: Array) -> Array:
    """hidden's product from exponentials that are all in scratch, times each position's `scale`: [those, H] float32."""
    from onchip.vocab.mosaic import products

    layer, tokens = at.layer, len(scale)
    slices = hidden_slices(tokens, layer.hidden.shape[1])
    made: Any = products.hidden_product(
        layer.weight, at.number, vocab_major=layer.vocab_axis == 0, tokens=tokens, recomputed=in_scratch, scale=scale,
        slices=slices, config=tiles_of(at.call)["hidden_product"],
    )  # fmt: skip
    return jnp.sum(made.reshape(slices, tokens, -1), 0)


def hidden_of_kept(
    at: Positions,
    kept: Exponentials,
    in_gradient: int,
    scale: Array,
    first: Array | None = None,
    size: int | None = None,
    done: Any = None,
) -> tuple[Any, Array]:
    """As `hidden_in_slices`, where the exponentials of the first `in_gradient` positions are in the memory of the
    weight's gradient: with `memory` of `Exponentials` as it is after it, so that nothing is written there before.

    first, size: the product is of so many positions from there on; beyond the last one it is 0.  None: of all.
    done: what must be there before memory is taken.
    """
    from onchip.kernels.mosaic.launch import written
    from onchip.vocab.mosaic import products

    layer, tokens = at.layer, size or len(scale)
    static = {
        "kernel": products.hidden_product, "vocab_major": layer.vocab_axis == 0, "tokens": tokens,
        "kept_tokens": in_gradient, "halves": True, "config": tiles_of(at.call)["hidden_product"],
    }  # fmt: skip
    # From a zero of its own, or XLA would make one matrix for all parts and copy it.
    zeros = jnp.broadcast_to(after(jnp.zeros((), jnp.float32), done), (tokens, layer.hidden.shape[1]))
    made: tuple[Any, Array] = written(
        _add_hidden, static, (kept.memory, zeros), layer.weight, at.number, kept.lying((None, None)), scale,
        None if first is None else first.reshape(1),
    )  # fmt: skip
    return made


def _add_hidden(
    into: Any, weight: Array, number: Array, beside: Exponentials, scale: Array, begin: Array | None, *, kernel: Any,
    **static: Any,
) -> None:  # fmt: skip
    """Add hidden's product, made from exponentials in memory that is a reference, to another one."""
    kept = beside.lying(into[0])
    kernel(
        weight, number, kept=kept.gradient, in_digits=kept.digits, in_scratch=kept.scratch and kept.scratch.spare,
        scale=scale, first_token=begin, add_to=into[1], **static,
    )  # fmt: skip


def write_gradient(
    into: Any, operands: Operands, *vectors: Array, kernel: Any, of_entropy: Mapping[str, Array], **more: Any
) -> None:
    """Write the gradient of a chunk's logits to a reference."""
    kernel(operands, *vectors, into=into, **of_entropy, **more)


def add_again(into: Sequence[Any], weight: Array, number: Array, *, kernel: Any, **more: Any) -> None:
    """Add hidden's product, made from gradients of logits, to one or two references."""
    kernel(weight, number, add_to=into[0], second=into[1] if len(into) > 1 else None, **more)
