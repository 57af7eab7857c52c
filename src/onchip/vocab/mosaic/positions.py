"""What the 'mosaic_gpu' backend does around its kernels, in plain JAX.

Tokens that are not ignored are compacted to the front, in the order of their labels: a *position* is an index among
those.  P is the number of tokens rounded up to a multiple of 128.  The kernels reduce each tile of logits to a few
numbers for each position; here they are merged to a token's statistics, and, in backward, each position's factors are
prepared for the kernels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import vary_alike
from onchip.vocab.mosaic.bits import join
from onchip.vocab.mosaic.head import VOCAB_TILE, MosaicPlan
from onchip.vocab.xla.loss import LossCall
from onchip.vocab.xla.tiles import (
    CountedTokens,
    Softmax,
    Wanted,
    XlaProjection,
    XlaTokenGradient,
    XlaTokenStats,
    cut_rows,
    float16_scale,
    select_tokens,
)

Array = jax.Array
# The kernels' maximum where every logit is -inf: finite, even times a scale, so that no difference of two is NaN.
LOWEST = -1.0e30
# What stands for the label of a position that has none, where labels are sorted.
NO_LABEL = 2**31 - 1


def select(plan: Any, labels: Array) -> CountedTokens:
    return select_tokens(labels, max(1, plan.positions(len(labels))), by_label=True)


class Operands(NamedTuple):
    """What the kernels make the logits of some positions from."""

    rows: Array  # [P, H] bfloat16 or float16, 0 beyond the last token
    weight: Array  # [V, H], or [H, V]
    label: Array  # [P] int32, -1 where there is none
    factor: Array  # [P] float32, above 0; 1 beyond the last token
    number: Array  # [1] int32: how many of the positions are there; the kernels work through whole tiles of them
    bias: Array | None = None  # [V up to a multiple of 256] float32
    inner_scale: Array | None = None  # [1] float32, with softcap: of the product before tanh
    class_weight: Array | None = None  # [V up to a multiple of 256] float32: of label smoothing's part of each entry


class MosaicLabels(NamedTuple):
    """Soft labels of every entry, as the kernels take them."""

    values: Array  # [T, V] float32, bfloat16 or float16
    first: Array  # [1] int32: the token of the first position; the others' follow


class MosaicPartials(NamedTuple):
    """What the softmax kernels leave for each part of the vocabulary and each position, [parts, P]; None: not wanted.

    Positions past the last tile that counts are left unwritten.  With soft labels q for every entry, each part's
    largest logit is left out in place of the label.
    """

    maximum: Any  # float32: of z
    others: Any  # float32: sum of exp(z - maximum) over all but the label
    offset_sum: Any = None  # float32: sum of z - maximum, weighted by class
    moment: Any = None  # float32: sum of exp(z - maximum) * (z - maximum)
    argmax: Any = None  # int32
    cost: Any = None  # float32: sum of q * (maximum - z), q being weighted by class
    mass: Any = None  # float32: sum of q, weighted by class
    plain_cost: Any = None  # float32: the same two of q as it is, where that isn't the same
    plain_mass: Any = None
    squares: Any = None  # float32: sum of exp(z - maximum)**2 over all but the label

    @staticmethod
    def empty(
        parts: int, tokens: int, wanted: Wanted, *, labels: bool = False, weighed: bool = False
    ) -> "MosaicPartials":
        """For soft `labels` of every entry, which may be `weighed` by class."""

        def some(wanted: bool = True, dtype: Any = jnp.float32) -> Any:
            return lax.empty((parts, tokens), dtype) if wanted else None

        known = some(), some(), some(wanted.even), some(wanted.entropy), some(wanted.argmax, jnp.int32)
        plain = labels and weighed and wanted.entropy
        return MosaicPartials(*known, some(labels), some(labels), some(plain), some(plain), some(wanted.sum_sq))


class Positions(NamedTuple):
    """A call as the kernels take it.

    Logits are x * factor, with x = tanh((product + bias) * inner), or product + bias without softcap.
    """

    call: LossCall
    ids: Array  # [P, K] int32: the call's, as this device's entries are numbered; negative where there is none
    there: Array  # [P] bool: not beyond the last token, nor before a chunk's first one
    number: Array  # [1] int32: how many there are, but `least` at least
    label: Array  # [P] int32, -1 where there is none
    factor: Array  # [P] float32; 1 beyond the last token
    bias: Array | None  # [V up to a multiple of 256] float32
    inner: Array | None  # [1] float32
    class_weight: Array | None  # [V up to a multiple of 256] float32, where label smoothing is weighted by class

    @staticmethod
    def of(call: LossCall, least: Array | int = 1) -> "Positions":
        """least: 1 where the kernels must write something even if no position is there, else 0."""
        transform, bias, there, ids = call.transform, call.source.bias, call.tokens.there(), call.ids
        each = None if call.terms is None or call.terms.label_smoothing is None else call.class_weight
        if call.shard is not None:
            each = None if each is None else call.shard.entries(each)
            ids = call.shard.local_ids(ids)
            if call.shard.end is not None:
                bias = jnp.zeros(call.source.vocab, jnp.float32) if bias is None else bias
                counts = jnp.arange(call.source.vocab) < call.shard.end
                bias = jnp.where(counts, bias, -jnp.inf)
                each = counts if call.terms is None else each  # the mean of logits is that of entries that count
        bias, each = (
            None if x is None else jnp.pad(x.astype(jnp.float32), (0, -call.source.vocab % VOCAB_TILE))
            for x in (bias, each)
        )
        factor = jnp.ones((), jnp.float32) if transform.logit_scale is None else transform.logit_scale
        inner = None
        if transform.softcap is not None:
            inner, factor = (factor / transform.softcap).reshape(1), transform.softcap
        if transform.temperature is not None:
            factor = factor / transform.temperature
        made = Positions(
            call=call,
            ids=ids,
            there=there,
            number=jnp.maximum(call.tokens.number, least).reshape(1),
            label=jnp.maximum(ids[:, 0], -1),
            factor=jnp.where(there, jnp.broadcast_to(factor, there.shape), 1),
            bias=bias,
            inner=inner,
            class_weight=each,
        )
        if call.shard is None:
            return made
        source, *fields = vary_alike((call.source, *made[1:]))
        return Positions(call._replace(source=source), *fields)

    @property
    def layer(self) -> XlaProjection:
        return self.call.source  # type: ignore[no-any-return]

    def operands(self, rows: Array, part: slice) -> Operands:
        """The operands for the positions of `part`, with these hidden states."""
        weight, number = self.layer.weight, self.number_in(part)
        label, factor = self.label[part], self.factor[part]
        return Operands(rows, weight, label, factor, number, self.bias, self.inner, self.class_weight)

    def rows(self, source: Array) -> Array:
        """The hidden states of these tokens, and 0 beyond the last."""
        return self.layer.hidden.at[source].get(mode="fill", fill_value=0)  # type: ignore[no-any-return]

    def weight_rows(self, label: Array) -> Array:
        """[P, H] float32: each label's row of the weight."""
        at, weight = jnp.maximum(label, 0), self.layer.weight
        rows = weight.at[at].get(mode="clip") if self.layer.vocab_axis == 0 else weight.at[:, at].get(mode="clip").T
        return rows.astype(jnp.float32)  # type: ignore[no-any-return]

    def target_logit(self, rows: Array, part: slice, label: Array | None = None) -> Array:
        """The targets' logits for the positions of `part`, with these hidden states; of `label`, if those aren't the
        call's.
        """
        label = self.label[part] if label is None else label
        x = jnp.sum(rows.astype(jnp.float32) * self.weight_rows(label), 1)
        if self.bias is not None:
            x += self.bias[jnp.maximum(label, 0)]
        if self.inner is not None:
            x = jnp.tanh(x * self.inner)
        return jnp.where(label >= 0, x * self.factor[part], LOWEST)

    def number_in(self, part: slice) -> Array:
        """[1]: how many positions of this part exist."""
        return jnp.clip(self.number - part.start, 0, part.stop - part.start)

    def parts(self, plan: MosaicPlan) -> list[slice]:
        """The positions whose softmax is taken at a time."""
        padded = len(self.label)
        size = min(plan.token_chunk, padded) if plan.strategy == "forward" else padded
        return [slice(first, min(first + size, padded)) for first in range(0, padded, size)]

    @property
    def sorted_label(self) -> Array:
        """[P] in ascending order: the labels if they are this device's entries, below 0 for entries before those,
        NO_LABEL for entries behind.
        """
        label = self.call.ids[:, 0]
        known = self.there & (label >= 0)
        if self.call.shard is not None:
            label = label - self.call.shard.start
            known &= label < self.layer.vocab
        return jnp.where(known, label, NO_LABEL)

    @property
    def gradient_dtype(self) -> Any:
        """The dtype of hidden's gradient, which isn't rounded before it is summed over devices."""
        return self.layer.hidden.dtype if self.call.shard is None else jnp.float32

    def in_parts(self, plan: MosaicPlan, made: list[Any]) -> Iterator[tuple[Array, slice]]:
        """The hidden states of each part of the positions; those of a part are fetched once the last of `made` is
        there.
        """
        for part in self.parts(plan):
            done = jax.tree.leaves(made[-1])[0] if made else self.call.tokens.number
            yield self.rows(after(self.call.tokens.source[part], done)), part

    def joined(self, made: list[XlaTokenStats] | list[Softmax]) -> XlaTokenStats:
        """The statistics of all positions, joined from those that `stats` makes of neighbouring parts."""
        whole: Any = concatenated(made)
        if self.call.shard is not None:
            whole = self.call.shard.joined(whole).complete(self.call.ids, self.call.vocab)
        return whole  # type: ignore[no-any-return]

    def stats(
        self,
        partials: MosaicPartials,
        target: Array,
        part: slice,
        label: Array | None = None,
        picked: Array | None = None,
    ) -> Any:
        """The statistics of the positions of `part`, over all parts of the tiles; if the vocabulary is split over
        devices, the `Softmax` of this device's part.

                label: what the kernel took for labels, if those aren't the call's.
                picked: logits [part, K] of the call's ids, if the target isn't the only one.
        """
        label = self.label[part] if label is None else label
        there, vocab = self.there[part], self.layer.vocab
        # What is there of positions past the last one may be anything; it stays in their columns.
        maximum = partials.maximum
        # The target's logit was computed apart: the last digit may differ.  So where it leads, all is relative to it,
        # and its part's maximum is it: of an entropy near 0 that digit would be the largest error.
        if partials.argmax is not None:
            maximum = jnp.where(partials.argmax == label[None], target[None], maximum)
        top = jnp.max(maximum, 0)
        # Not where devices compare their largest to find that of all.
        if self.call.shard is None or partials.argmax is None:
            top = jnp.where(target > top - 1, target, top)
        picked = target[:, None] if picked is None else picked
        drop = maximum - top[None]
        decay = jnp.exp(drop)
        offset_sum = moment = argmax = weight = None

        def sums_where_there(values: Array) -> Array:
            return jnp.where(there, jnp.sum(values, 0), 0)

        parts = maximum.shape[0]
        width = -(-vocab // VOCAB_TILE) * VOCAB_TILE // parts
        first = jnp.arange(parts, dtype=jnp.int32)[:, None] * width
        if partials.offset_sum is not None:
            entries = jnp.clip(vocab - first, 0, width).astype(jnp.float32)
            if self.class_weight is not None:
                entries = jnp.sum(self.class_weight.reshape(parts, width), 1)[:, None]
                weight = jnp.broadcast_to(jnp.sum(entries), label.shape)
            offset_sum = sums_where_there(jnp.where(entries > 0, partials.offset_sum + drop * entries, 0))
        if partials.moment is not None:
            # The target belongs to its part's moment, and to its sum here.
            own = (label[None] >= first) & (label[None] < first + width)
            total = partials.others + jnp.where(own, jnp.exp((target - top)[None] - drop), 0)
            moment = sums_where_there(jnp.where(decay > 0, decay * (partials.moment + total * drop), 0))
        if partials.argmax is not None:
            best = jnp.argmax(maximum, 0)
            argmax = jnp.take_along_axis(partials.argmax, best[None], 0)[0]
        top, others = jnp.where(there, top, LOWEST), sums_where_there(partials.others * decay)
        total = others + jnp.exp(target - top)
        # log1p where the label leads: there the loss is small, and 1 + others would round it away.
        log_total = jnp.where(target == top, jnp.log1p(others), jnp.log(total))
        leads, more = target == top, {"weight": weight}
        if partials.squares is not None:
            squares = sums_where_there(partials.squares * decay * decay)
            whole = squares + jnp.square(jnp.exp(target - top))
            more |= {"squares": whole, "squares_below": jnp.where(leads, squares, whole - 1)}
        if self.call.shard is not None:
            # Another's label isn't in the sum of the others: there the largest is.
            below, picked = jnp.where(leads, others, total - 1), jnp.where(self.ids[part] >= 0, picked, 0)
            return Softmax(top, total, below, picked, offset_sum, moment, argmax, **more)
        softmax = Softmax(top, total, others, picked, offset_sum, moment, argmax, **more)
        return softmax.complete(self.call.ids[part], vocab, log_total)


def concatenated(made: list[Any]) -> Any:
    """Join trees of [part, ...] values along the first dimension."""
    return made[0] if len(made) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *made)


def rows_from(call: LossCall, start: Array | int, size: int) -> LossCall:
    """So many rows of a call, from `start` on, without what its loss is reduced with."""
    tokens, temperature = call.tokens, call.transform.temperature
    by_row = temperature if temperature is not None and temperature.ndim else None
    ids, source, by_row = cut_rows((call.ids, tokens.source, by_row), start, size)
    transform = call.transform if by_row is None else call.transform._replace(temperature=by_row)
    tokens = tokens._replace(source=source, number=jnp.clip(tokens.number - start, 0, size))
    return call._replace(transform=transform, tokens=tokens, ids=ids)


def after(x: Any, *what: Any) -> Any:
    """`x`, but not before `what` exists, so that memory is taken only when it is needed."""
    return lax.optimization_barrier((x, *what))[0]


def unfused(arrays: Any) -> Any:
    """The arrays, fenced off: XLA must not fuse a kernel that writes to them in place with a slice that they come from
    or go to, as in a scan.  It then wrote elsewhere (jaxlib 0.11.2, dynamic slice fusion).
    """
    return lax.optimization_barrier(arrays)


# ----------------------------------------------------------------------------------------------------------- backward


class Upstream(NamedTuple):
    """What backward knows about each position, [P] float32; 0 beyond the last token."""

    factor: Array  # of p
    at_target: Array  # the target's entry of the gradient, but for softcap's derivative; of several ids the first's
    lse: Array  # inf beyond the last token
    even: Array | None  # label smoothing's part of each entry, but for the class's weight
    labels: Array | None  # of soft labels of every entry
    entropy: Array | None  # of p (z - mean)
    mean: Array | None  # of the logits under their softmax, with it
    inverse_grad_scale: Array | None  # [1]: what products are multiplied by, where rows were scaled up for float16

    @staticmethod
    def of(positions: Positions, stats: XlaTokenStats, gradient: XlaTokenGradient) -> tuple["Upstream", Array]:
        """From the gradient with respect to the final logits.  Also returns what the gradient with respect to the
        linear layer's logits is at each of the ids, [P, K].
        """
        call, there = positions.call, positions.there
        gradient = gradient.times(call.transform.factor())
        grad_scale = float16_scale(gradient.size(call.mass), call.source.hidden.dtype)
        gradient = gradient.times(grad_scale)

        def masked(x: Array | None) -> Any:
            return None if x is None else jnp.where(there, x, 0)

        above = Upstream(
            masked(gradient.factor),
            jnp.where(positions.label >= 0, masked(gradient.at_ids[:, 0]), 0),
            jnp.where(there, stats.lse, jnp.inf),
            masked(gradient.even),
            masked(gradient.labels),
            masked(gradient.entropy),
            None if gradient.entropy is None else masked(stats.mean),
            None if grad_scale is None else (1 / grad_scale).reshape(1),
        )
        return above, gradient.at_ids

    def apart(self, positions: Positions, stats: XlaTokenStats) -> "Upstream":
        """The same for targets whose terms are added to products of all other entries, with softcap's derivative.
        Label smoothing then takes its part from all entries alike, and the target gets its own part back.
        """
        at_target = self.at_target
        if positions.inner is not None:
            x = (stats.log_prob[:, 0] + stats.lse) / positions.factor
            at_target = jnp.where(at_target == 0, 0, at_target * (1 - x * x))
        if self.even is not None:
            at_target += jnp.where(positions.label >= 0, self.even, 0)
        return self._replace(at_target=at_target)

    def of_entropy(self, part: slice) -> dict[str, Any]:
        """What kernels take of it for the entropy, for these positions."""
        if self.entropy is None or self.mean is None:
            return {}
        return {"entropy": self.entropy[part], "mean": self.mean[part]}

    def unscaled(self, x: Array) -> Array:
        return x if self.inverse_grad_scale is None else x * self.inverse_grad_scale[0]


def gradient_of_first(positions: Positions, upstream: Upstream, sums: Array, *, targets: bool) -> Array:
    """hidden's gradient [T, H]: from `sums` for the tokens with the first positions, 0 for all others.

    With `targets` the sums lack the targets' terms.
    """
    tokens = positions.call.tokens
    mine = tokens.kept & (tokens.place < sums.shape[0])
    value = sums.at[tokens.place].get(mode="clip")
    if targets:
        value += _targets_terms(positions, upstream, tokens.place)
    dtype = positions.gradient_dtype
    return jnp.where(mine[:, None], upstream.unscaled(value).astype(dtype), jnp.zeros((), dtype))


def gradient_of_sums(positions: Positions, upstream: Upstream, first: Array, digits: Array) -> Array:
    """hidden's gradient [T, H] from sums in 24 bits, which lack the tokens' factors and the targets' terms."""
    tokens, dtype = positions.call.tokens, positions.gradient_dtype
    value = join(first, digits.astype(jnp.uint32)) * upstream.factor.at[tokens.place].get(mode="clip")[:, None]
    value = upstream.unscaled(value + _targets_terms(positions, upstream, tokens.place))
    return jnp.where(tokens.kept[:, None], value.astype(dtype), jnp.zeros((), dtype))


def gradient_with_last(gradient: Array, positions: Positions, upstream: Upstream, sums: Array) -> Array:
    """hidden's gradient [T, H], with that of the tokens in the last positions taken from `sums`; the others'
    exponentials are kept.  XLA writes these rows in place.
    """
    start = positions.label.shape[0] - sums.shape[0]
    value = sums + _targets_terms(positions, upstream, slice(start, None))
    # Beyond the last token there is none; no two of these are the same.
    nowhere = gradient.shape[0] + jnp.arange(sums.shape[0])
    token = jnp.where(positions.there[start:], positions.call.tokens.source[start:], nowhere)
    return gradient.at[token].set(upstream.unscaled(value).astype(gradient.dtype), mode="drop", unique_indices=True)


def _targets_terms(positions: Positions, upstream: Upstream, at: Any) -> Array:
    """What hidden's gradient lacks at some positions, with `upstream` as `apart` gives it."""
    terms = upstream.at_target[at][:, None] * positions.weight_rows(positions.label[at])
    if upstream.even is None:
        return terms
    total = jnp.sum(positions.layer.weight, positions.layer.vocab_axis, dtype=jnp.float32)
    return terms - upstream.even[at][:, None] * total[None]


def bias_gradient(sums: Array, positions: Positions, upstream: Upstream) -> Array:
    """The bias's gradient, from its sums [V rounded up]."""
    return upstream.unscaled(sums[: positions.layer.vocab])
