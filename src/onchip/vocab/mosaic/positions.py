"""What the JAX backends with kernels of their own do around them, in plain JAX.

Tokens that are not ignored are compacted to the front, in the order of their labels: a *position* is an index among
those.  P is the number of tokens rounded up to a multiple of 128.  The kernels reduce each tile of logits to a few
numbers for each position; here they are merged to a softmax and a loss, and, in backward, each position's factors are
prepared for the kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.core import configs
from onchip.frontend.jax_call import Static, Tensors
from onchip.vocab.mosaic.memory import TOKEN_TILE, VOCAB_TILE, MosaicPlan
from onchip.vocab.xla.call import LinearCrossEntropyStats, Outputs
from onchip.vocab.xla.tiles import PerToken, Softmax, Tokens, complete, gradient_rows, select_tokens, sum_kept

Array = jax.Array
# The kernels' maximum where every logit is -inf: finite, so that a difference of two is never NaN.
LOWEST = -1.0e30


class Saved(NamedTuple):
    """What forward leaves for backward; by position where not said otherwise."""

    tensors: Tensors
    tokens: Tokens
    label: Array  # [P] int32, -1 where there is none
    lse: Array  # [P] float32
    log_prob: Array  # [P] float32
    base: Array | None = None  # [P] float32: what exponentials are relative to
    stash: Array | None = None  # of the shape and dtype of weight: exponentials, see mosaic_blocks.py
    spare: Array | None = None  # more of them
    overflow: Array | None = None  # those of more tokens


class Head(NamedTuple):
    """The linear layer as the kernels take it.

    Logits are x * factor, with x = tanh((product + bias) * inner), or product + bias without softcap.
    """

    weight: Array
    vocab_axis: int
    bias: Array | None  # [V up to a multiple of 256] float32
    inner: Array | None  # [1] float32
    factor: Array | float  # [] float32, but for the temperature
    tiles: Mapping[str, Any]  # how each kernel is cut

    @property
    def vocab(self) -> int:
        return self.weight.shape[self.vocab_axis]


def make_head(static: Static, tensors: Tensors, tiles: Mapping[str, Any]) -> Head:
    vocab = tensors.weight.shape[static.vocab_axis]
    bias = tensors.bias
    if bias is not None:
        bias = jnp.pad(bias.astype(jnp.float32), (0, -vocab % VOCAB_TILE))
    scale = jnp.ones((), jnp.float32) if tensors.logit_scale is None else tensors.logit_scale
    inner, factor = None, scale
    if tensors.softcap is not None:
        inner, factor = (scale / tensors.softcap).reshape(1), tensors.softcap
    return Head(tensors.weight, static.vocab_axis, bias, inner, factor, tiles)


def stored_tiles(
    static: Static, tensors: Tensors, heuristics: Mapping[str, Mapping[str, int]]
) -> dict[str, Mapping[str, int]]:
    """How each kernel is cut: as is stored for the device and the sizes, else as is given."""
    tokens, hidden = tensors.hidden.shape
    slug = configs.device_slug(str(jax.devices()[0].device_kind))
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": tensors.weight.shape[static.vocab_axis]}
    return {
        kernel: configs.find_config("linear_cross_entropy", kernel, slug, static.dtype, sizes, heuristic).config
        for kernel, heuristic in heuristics.items()
    }


def is_there(tokens: Tokens) -> Array:
    """[P] bool: not beyond the last token."""
    return jnp.arange(tokens.label.shape[0]) < tokens.number


def logit_factor(head: Head, tokens: Tokens) -> Array:
    """[P] float32: z = x * factor; 1 beyond the last token."""
    factor = head.factor if tokens.temperature is None else head.factor / tokens.temperature
    return jnp.where(is_there(tokens), jnp.broadcast_to(factor, tokens.label.shape), 1)


def hidden_rows(tensors: Tensors, source: Array) -> Array:
    """Hidden states by position, 0 beyond the last token."""
    return tensors.hidden.at[source].get(mode="fill", fill_value=0)


def weight_rows(head: Head, label: Array) -> Array:
    """[P, H] float32: the weight of each label."""
    at = jnp.maximum(label, 0)
    rows = head.weight.at[at].get(mode="clip") if head.vocab_axis == 0 else head.weight.at[:, at].get(mode="clip").T
    return rows.astype(jnp.float32)


def target_logit(head: Head, rows: Array, label: Array, factor: Array) -> Array:
    x = jnp.sum(rows.astype(jnp.float32) * weight_rows(head, label), 1)
    if head.bias is not None:
        x += head.bias[jnp.maximum(label, 0)]
    if head.inner is not None:
        x = jnp.tanh(x * head.inner)
    return jnp.where(label >= 0, x * factor, LOWEST)


def after(x: Any, *what: Any) -> Any:
    """`x`, but not before `what` is there: so that memory is taken when it is needed."""
    return lax.optimization_barrier((x, *what))[0]


def alone(arrays: Any) -> Any:
    """The arrays, so that XLA doesn't make one operation of a kernel that writes to them in place and a slice that they
    come from or go to, as in a scan: it then wrote elsewhere (jaxlib 0.11.2, dynamic slice fusion).
    """
    return lax.optimization_barrier(arrays)


# ------------------------------------------------------------------------------------------------------------ forward


def forward(
    static: Static,
    config: MosaicPlan,
    head: Head,
    tensors: Tensors,
    take_softmax: Callable[[Array, Array, Array, Array], tuple[Softmax, tuple[Array | None, ...]]],
) -> tuple[Outputs, Saved | None]:
    """The loss with its statistics, and what backward needs.

    `take_softmax(rows, label, factor, count)` is the softmax of some positions, with what `Saved` has from
    `base` on.
    """
    tokens = select_tokens(static, tensors, TOKEN_TILE, by_label=True)
    label = jnp.where(is_there(tokens) & ~tokens.bad, tokens.label, -1)
    factor = logit_factor(head, tokens)
    padded = label.shape[0]
    size = min(config.token_chunk, padded) if config.strategy == "forward" else padded
    if size < padded:
        # Traced and lowered once: a kernel takes a second.
        take_softmax = jax.jit(take_softmax)
    made = []
    done = tokens.number
    held: tuple[Array | None, ...] = ()
    for first in range(0, padded, size):
        part = slice(first, first + size)
        rows = hidden_rows(tensors, after(tokens.source[part], done))
        count = jnp.clip(tokens.number - first, 0, size)
        softmax, held = take_softmax(rows, label[part], factor[part], count)
        done = softmax.max
        made.append(softmax)
    softmax = made[0] if len(made) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *made)
    per_token: PerToken = complete(softmax, label, tensors, tokens.bad, head.vocab)
    loss = per_token.loss * tokens.weight
    loss = tokens.spread(loss) if static.reduction == "none" else sum_kept(loss, tokens) * tokens.inverse_count
    stats = None
    if per_token.entropy is not None and per_token.correct is not None:
        columns = (per_token.lse, per_token.log_prob, per_token.entropy, per_token.correct)
        stats = LinearCrossEntropyStats(*map(tokens.spread, columns))
    saved = None
    if config.strategy != "forward":
        saved = Saved(tensors, tokens, label, per_token.lse, per_token.log_prob, *held)
    return Outputs(loss, stats), saved


def merge(partials: Any, target: Array, label: Array, there: Array, vocab: int) -> Softmax:
    """The softmax over all parts of the tiles."""
    # What is there of positions past the last one may be anything; it stays in their columns.
    maximum = partials.maximum
    # The target's logit was computed apart: the last digit may differ.
    top = jnp.maximum(jnp.max(maximum, 0), target)
    drop = maximum - top
    decay = jnp.exp(drop)
    offset_sum = moment = argmax = None

    def sums_where_there(values: Array) -> Array:
        return jnp.where(there, jnp.sum(values, 0), 0)

    parts = maximum.shape[0]
    width = -(-vocab // VOCAB_TILE) * VOCAB_TILE // parts
    first = jnp.arange(parts, dtype=jnp.int32)[:, None] * width
    if partials.offset_sum is not None:
        entries = jnp.clip(vocab - first, 0, width).astype(jnp.float32)
        offset_sum = sums_where_there(jnp.where(entries > 0, partials.offset_sum + drop * entries, 0))
    if partials.moment is not None:
        # The target belongs to its part's moment, and to its sum here.
        own = (label >= first) & (label < first + width)
        total = partials.others + jnp.where(own, jnp.exp(target - top - drop), 0)
        moment = sums_where_there(jnp.where(decay > 0, decay * (partials.moment + total * drop), 0))
        best = jnp.argmax(maximum, 0)
        argmax = jnp.take_along_axis(partials.argmax, best[None], 0)[0]
    return Softmax(
        jnp.where(there, top, LOWEST), target, sums_where_there(partials.others * decay), offset_sum, moment, argmax
    )


# ----------------------------------------------------------------------------------------------------------- backward


class Upstream(NamedTuple):
    """What backward knows of each position, [P] float32; 0 beyond the last token."""

    row: Array  # factor of the position's row of the gradient
    scale: Array  # the same times 1 + 2 z_loss lse
    at_target: Array  # the target's entry of the gradient, but for softcap's derivative
    even: Array | None  # label smoothing's part of each entry
    lse: Array  # inf beyond the last token
    shrink: Array | None  # [1]: what products are multiplied by, where rows were scaled up for float16


def upstream(static: Static, head: Head, saved: Saved, grad_loss: Array) -> Upstream:
    tensors, tokens = saved.tensors, saved.tokens
    upstream = grad_loss.astype(jnp.float32)
    if static.reduction == "none":
        upstream = upstream.at[tokens.source].get(mode="fill", fill_value=0)
    row, too_large = gradient_rows(tokens, tensors, upstream)
    there = is_there(tokens)
    row = jnp.where(there, row, 0)
    scale, at_target = row, jnp.expm1(saved.log_prob)
    even = None
    if tensors.z_loss is not None:
        more = 2 * tensors.z_loss * saved.lse
        scale = row * (1 + more)
        at_target += more * jnp.exp(saved.log_prob)
    if tensors.label_smoothing is not None:
        even = row * (tensors.label_smoothing / head.vocab)
        at_target += tensors.label_smoothing * (1 - 1 / head.vocab)
    return Upstream(
        row,
        jnp.where(there, scale, 0),
        jnp.where(there & (saved.label >= 0), row * at_target, 0),
        even,
        jnp.where(there, saved.lse, jnp.inf),
        None if too_large is None else (1 / too_large).reshape(1),
    )


def gradient_of_first(head: Head, saved: Saved, upstream: Upstream, sums: Array, shrink: Any) -> Array:
    """hidden's gradient [T, H]: of the tokens with the first positions from `sums`, of all others 0."""
    place = saved.tokens.place
    mine = saved.tokens.kept & (place < sums.shape[0])
    value = sums.at[place].get(mode="clip")
    if saved.stash is not None:
        entry = upstream.at_target[place]
        value += entry[:, None] * weight_rows(head, saved.label[place])
    dtype = saved.tensors.hidden.dtype
    return jnp.where(mine[:, None], (value * shrink).astype(dtype), jnp.zeros((), dtype))


def gradient_with_last(
    gradient: Array, head: Head, saved: Saved, upstream: Upstream, sums: Array, shrink: Any
) -> Array:
    """hidden's gradient [T, H] with that of the tokens with the last positions from `sums`, where exponentials are
    kept of the others.  XLA writes these rows in place.
    """
    start = saved.label.shape[0] - sums.shape[0]
    value = sums + upstream.at_target[start:, None] * weight_rows(head, saved.label[start:])
    # Beyond the last token there is none; no two of these are the same.
    nowhere = gradient.shape[0] + jnp.arange(sums.shape[0])
    token = jnp.where(is_there(saved.tokens)[start:], saved.tokens.source[start:], nowhere)
    return gradient.at[token].set((value * shrink).astype(gradient.dtype), mode="drop", unique_indices=True)
