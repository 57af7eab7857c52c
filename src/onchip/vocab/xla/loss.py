"""The calls of JAX's losses over a vocabulary: their arrays by token and by row, what a cross-entropy needs, and how
the losses of tokens are reduced.

The maths of a cross-entropy is in `onchip.vocab.loss`.  Labels are fields of a call: K ids for each token with
probabilities, one id with a probability of 1, or probabilities of every entry.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE
from onchip.frontend.jax_inputs import as_constant, following, per_token_constant, token_temperature
from onchip.frontend.jax_labels import labels_of
from onchip.frontend.jax_mesh import BY_ENTRY, BY_TOKEN, WHOLE
from onchip.frontend.jax_types import WithStats
from onchip.frontend.options import LossStats, LossTerms
from onchip.vocab import loss
from onchip.vocab.xla.tiles import (
    CountedTokens,
    Transform,
    Wanted,
    XlaTokenGradient,
    XlaTokenStats,
    float16_scale,
    shares,
)

Array = jax.Array


class Reduction(NamedTuple):
    """What each token's loss is multiplied by."""

    weight: Array  # [P]: 0 in rows without a token, NaN where the label is out of range
    inverse_count: Array  # []: 1 / what the mean divides by; 1 for a sum, and for one loss per token

    @staticmethod
    def of(
        tokens: CountedTokens,
        label: Array,
        token_weight: Array | None,
        normalizer: Array | None,
        mean: bool,
        dtype: Any,
    ) -> "Reduction":
        """`label` is by row, `token_weight` by token; `dtype` is that of sums."""
        weight = jnp.ones(label.shape, dtype) if token_weight is None else tokens.take(token_weight, 0)
        weight = jnp.where(label == OUT_OF_RANGE, jnp.nan, jnp.where(tokens.there(), weight, 0))
        divisor: Array = jnp.ones((), dtype)
        if mean:
            divisor = jnp.maximum(tokens.number, 1).astype(dtype)
            # If no token counts, the mean is 0, whatever the normalizer.
            divisor = divisor if normalizer is None else jnp.where(tokens.number > 0, normalizer, divisor)
        return Reduction(weight, 1 / divisor)

    def reduced(self, loss: Array, tokens: CountedTokens, *, per_token: bool) -> Array:
        """The mean or sum of losses by row, or each token's own loss."""
        loss = loss * self.weight
        return tokens.spread(loss) if per_token else tokens.sum(loss) * self.inverse_count

    def row_scale(self, upstream: Array, tokens: CountedTokens) -> Array:
        """[P]: the upstream gradient, [] or [T], of each row's loss."""
        upstream = upstream.astype(self.weight.dtype)
        upstream = tokens.take(upstream, 0) if upstream.ndim else upstream
        return self.weight * self.inverse_count * upstream


class XlaLossOutputs(NamedTuple):
    """What forward returns."""

    loss: Array  # [], or [T] with reduction "none"
    stats: LossStats[Array] | None  # [T], if asked for

    @staticmethod
    def of_nothing(reduction: str, return_stats: bool, dtype: Any) -> "XlaLossOutputs":
        """The outputs for a call without tokens."""
        none = jnp.zeros(0, dtype)
        loss = none if reduction == "none" else jnp.zeros((), dtype)
        stats = LossStats(none, none, none, jnp.zeros(0, bool), jnp.zeros(0, jnp.int32), none)
        return XlaLossOutputs(loss, stats if return_stats else None)

    def shaped(self, shape: tuple[int, ...]) -> Array | WithStats:
        """What a public function returns, for tokens of this shape: the loss, or with its statistics."""
        loss = self.loss.reshape(shape) if self.loss.ndim else self.loss
        if self.stats is None:
            return loss
        return loss, jax.tree.map(lambda x: jax.lax.stop_gradient(x).reshape(shape), self.stats)


class Given(NamedTuple):
    """The arrays of a public function's call that get no gradient."""

    probs: Any  # [..., K], or [..., V] where there are no labels; None: each token has one id
    labels: Any  # [...] or [..., K] int32 in [0, V), IGNORED or OUT_OF_RANGE
    token_weight: Any  # [...]
    temperature: Any  # [...], where each token has one
    normalizer: Any  # []
    class_weight: Any  # [V]
    numbers: Any  # the others, by name, []

    @staticmethod
    def of(
        op: str, given: Mapping[str, Any], name: str, vocab: int, options: Any, numbers: Mapping[str, Any], dtype: Any
    ) -> "Given":
        """From the arguments of a public function, whose target was given by `name`; raises for values that are wrong,
        where these can be read.  `numbers` are those of `checked_numbers`.
        """
        token_weight = given["token_weight"]
        numbers, temperature = token_temperature(numbers, given["temperature"], dtype)
        return Given(
            *labels_of(op, given, name, vocab, options, dtype),
            None if token_weight is None else lax.stop_gradient(jnp.asarray(token_weight, dtype)),
            temperature,
            as_constant(given["normalizer"], dtype),
            as_constant(given["class_weight"], dtype),
            numbers,
        )

    def shifted(self) -> "Given":
        """With the next position's label and weight, none at the end of each sequence; for one id per token."""
        weight = None if self.token_weight is None else following(self.token_weight, 0)
        return self._replace(labels=following(self.labels, IGNORED), token_weight=weight)

    def roles(self) -> "Given":
        """Which dimensions of each array are tokens or vocabulary."""
        of_probs = BY_ENTRY if self.labels is None else BY_TOKEN
        return Given(of_probs, BY_TOKEN, BY_TOKEN, BY_TOKEN, WHOLE, WHOLE, WHOLE)


class Constants(NamedTuple):
    """The arrays of a call that get no gradient, by token."""

    probs: Array | None  # [T, K], or [T, V] where there are no labels; None: each token has one id
    labels: Array | None  # [T] or [T, K] int32 in [0, V), IGNORED or OUT_OF_RANGE
    transform: Transform
    terms: LossTerms
    token_weight: Array | None  # [T]
    normalizer: Array | None  # []
    class_weight: Array | None  # [V]; None: there is none, or token_weight has it

    @staticmethod
    def of(given: Given, options: Any, dtype: Any, axes: tuple[str, ...] = ()) -> "Constants":
        """In the dtype of sums.  The mean is over the tokens of all devices along the mesh `axes`."""
        numbers = dict(given.numbers)
        if given.temperature is not None:
            numbers["temperature"] = given.temperature.reshape(-1)
        probs, labels = given.probs, given.labels
        made = Constants(
            None if probs is None else probs.reshape(-1, probs.shape[-1]),
            labels if labels is None else labels.reshape((-1,) if probs is None else (-1, labels.shape[-1])),
            Transform(*(numbers[name] for name in Transform._fields)),
            LossTerms(*(numbers[name] for name in LossTerms._fields)),
            per_token_constant(given.token_weight, dtype),
            given.normalizer,
            given.class_weight,
        )
        by_count = bool(axes) and options.reduction == "mean" and made.normalizer is None
        if probs is not None:
            count = len(made.probs) * lax.axis_size(axes) if by_count else 0  # type: ignore[arg-type]
            return made._replace(normalizer=jnp.full((), count, dtype)) if by_count else made
        if made.class_weight is not None:
            return made._weighed(options.reduction, axes)
        if by_count:
            count = lax.psum(jnp.sum(made.labels != IGNORED), axes)
            return made._replace(normalizer=jnp.maximum(count, 1).astype(dtype))
        return made

    def _weighed(self, reduction: str, axes: tuple[str, ...]) -> "Constants":
        """With class weights in what the mean divides by and, if they are factors of tokens' losses, in those too."""
        assert self.class_weight is not None
        of_label = jnp.where(self.labels == IGNORED, 0, self.class_weight.at[self.labels].get(mode="clip"))
        made = self
        if reduction == "mean" and self.normalizer is None:
            total = lax.psum(jnp.sum(of_label), axes) if axes else jnp.sum(of_label)
            made = made._replace(normalizer=jnp.where(total > 0, total, 1))
        if self.terms.there:
            return made
        token_weight = of_label if self.token_weight is None else self.token_weight * of_label
        return made._replace(token_weight=token_weight, class_weight=None)

    @property
    def kept(self) -> Array:
        """[T]: the tokens' labels, IGNORED for tokens that cost nothing; 0 if labels are of every entry."""
        if self.probs is None:
            assert self.labels is not None
            return self.labels
        return jnp.zeros(len(self.probs), jnp.int32)

    def wanted(self, stats: bool) -> Wanted:
        """The statistics that the loss needs, and those that the caller may have asked for."""
        even = self.terms.label_smoothing is not None
        weighed = even and self.class_weight is not None
        return Wanted(entropy=stats, argmax=stats, even=even, weighed=weighed)

    def problem(self) -> dict[str, Any]:
        """What the memory of a call depends on."""
        ids = 0 if self.probs is None or self.labels is None else self.labels.shape[1]
        return {
            "ids": ids,
            "labels": self.probs.dtype.name if self.probs is not None and not ids else "",
            "softcap": self.transform.softcap is not None,
            "smoothing": self.terms.label_smoothing is not None,
            "class_weight": self.class_weight is not None,
        }

    def call(self, reduction: str, source: Any, tokens: CountedTokens, shard: Any = None) -> "LossCall":
        own = tokens.take(self.kept, IGNORED) if self.probs is None else jnp.zeros(len(tokens.source), jnp.int32)
        mean = reduction == "mean"
        reduced = Reduction.of(tokens, own, self.token_weight, self.normalizer, mean, source.accumulator)
        ids, probs, entries = own[:, None], None, None
        if self.probs is not None and self.labels is not None:
            ids = tokens.take(self.labels, IGNORED)
            probs = jnp.where(ids == OUT_OF_RANGE, jnp.nan, tokens.take(self.probs, 0))
        elif self.probs is not None:
            entries = self.probs
        transform = self.transform.by_row(tokens)
        return LossCall(source, transform, tokens, ids, self.terms, reduced, self.class_weight, shard, probs, entries)


class LabelSums(NamedTuple):
    """Sums of the labels in a row, [P]; with statistics, all of the fields."""

    expected: Array  # of probability times log-probability, weighted by class
    plain: Any = None  # the same without weights
    mass: Any = None  # of probability; None: it is 1
    likeliest: Any = None  # int32: the id of the largest


class LossCall(NamedTuple):
    """The arrays of a call as a backend takes them, by row."""

    source: Any  # a `Projection` or `Logits`, or None where backward doesn't read it
    transform: Transform
    tokens: CountedTokens
    ids: Array  # [P, K] int32 in [0, V), IGNORED or OUT_OF_RANGE
    terms: Any = None  # of the loss; None where statistics are all that is asked for, as the next
    reduction: Any = None  # a `Reduction`
    class_weight: Any = None  # [V], where the loss is weighted by it
    shard: Any = None  # a `Shard` where the source has this device's entries of the vocabulary alone
    probs: Any = None  # [P, K]: of the ids; None: each row has one, whose probability is 1
    entries: Any = None  # [T, V], by token: of every entry that this device has; the ids are where largest logits are
    mass: Any = None  # [P]: their sums, weighted by class

    @property
    def vocab(self) -> int:
        """Entries of the vocabulary."""
        return self.source.vocab if self.shard is None else self.shard.vocab  # type: ignore[no-any-return]

    def weights(self) -> tuple[Array | None, Array | None]:
        """Class weights: those of the ids [P, K], and their mean; None for 1."""
        if self.class_weight is None:
            return None, None
        return self.class_weight.at[self.ids].get(mode="clip"), jnp.sum(self.class_weight) / self.vocab

    def label_sums(self, stats: XlaTokenStats) -> LabelSums:
        """The sums for labels that are ids."""
        (own, _), probs = self.weights(), self.probs
        plain = loss.expected(jnp, stats.log_prob, probs)
        if probs is None:
            return LabelSums(plain if own is None else plain * own[:, 0], plain, None, self.ids[:, 0])
        expected = plain if own is None else loss.expected(jnp, stats.log_prob, probs * own)
        if stats.entropy is None:
            return LabelSums(expected)
        likeliest = jnp.take_along_axis(self.ids, jnp.argmax(probs, 1)[:, None], 1)[:, 0]
        return LabelSums(expected, plain, jnp.sum(probs, 1), likeliest)

    def outputs(self, reduction: str, stats: XlaTokenStats, sums: LabelSums | None) -> XlaLossOutputs:
        """The outputs, from the statistics and, if labels are of every entry, their sums."""
        sums = self.label_sums(stats) if sums is None else sums
        value = loss.value(jnp, self.terms, sums.expected, stats.lse, stats.even_loss)
        made = self.reduction.reduced(value, self.tokens, per_token=reduction == "none")
        if stats.entropy is None:
            return XlaLossOutputs(made, None)
        assert stats.argmax is not None
        logit = sums.plain + stats.lse
        if sums.mass is not None:
            logit = jnp.where(sums.mass == 0, 0, sums.plain + sums.mass * stats.lse)
        correct = stats.argmax == sums.likeliest
        of_rows = LossStats(stats.lse, sums.plain, stats.entropy, correct, stats.argmax, logit)
        of_tokens = LossStats(*map(self.tokens.spread, of_rows))
        return XlaLossOutputs(made, of_tokens._replace(argmax=jnp.where(self.tokens.kept, of_tokens.argmax, -1)))

    def scaled_rows(self, upstream: Array) -> tuple[Array, Array | None]:
        """[P]: the factor of each row's gradient with respect to the linear layer's logits, and how much of it float16
        needs; for labels that are one id.
        """
        row_scale, factor = self.reduction.row_scale(upstream, self.tokens), self.transform.factor()
        row_scale = row_scale if factor is None else row_scale * factor
        size, (own, mean) = jnp.abs(row_scale), self.weights()
        if own is not None and mean is not None:
            size *= own[:, 0] + mean
        grad_scale = float16_scale(size, self.source.hidden.dtype)
        return row_scale if grad_scale is None else row_scale * grad_scale, grad_scale

    def gradient(self, stats: XlaTokenStats, row_scale: Array) -> XlaTokenGradient:
        """`row_scale` times the gradient of each row's loss with respect to the final logits."""
        terms, (own, mean) = self.terms, self.weights()
        q, mass = own, None if own is None else own[:, 0]
        others: Array | None = None
        if self.probs is not None:
            q, mass = self.probs if own is None else self.probs * own, self.mass
            if mass is None:
                mass, (q, others) = jnp.sum(q, 1), shares(self.ids, q)
            else:
                others = mass[:, None] - q
        of_p = loss.of_p(terms, mass, stats.lse, mean)
        log_prob, one = stats.log_prob, self.ids.shape[1] == 1
        of_ids: Any = (log_prob, q, others, own)
        if one:
            of_ids = (None if x is None else x[:, 0] for x in of_ids)
        log_prob, q, others, own = of_ids
        lse, row = (x if one else x[:, None] for x in (stats.lse, row_scale))
        at: Any = row * loss.at_entry(jnp, terms, log_prob, q, others, lse, self.vocab, own, mean)
        labels = None if self.entries is None else row_scale
        if labels is not None and terms.label_smoothing is not None:
            labels = (1 - terms.label_smoothing) * labels
        factor = row_scale if isinstance(of_p, float) else row_scale * of_p
        return XlaTokenGradient(factor, at[:, None] if one else at, even=self.even(row_scale), labels=labels)

    def even(self, row_scale: Array) -> Array | None:
        """[P]: what label smoothing takes from each logit's gradient, times the class's weight if there is one."""
        eps = self.terms.label_smoothing
        return None if eps is None else row_scale * (eps / self.vocab)
