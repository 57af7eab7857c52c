"""The per-token loss of linear_cross_entropy and cross_entropy, and how losses of tokens are summed up.

It stands here and not in an op, since two ops have it and kernels' backends take its terms.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE
from onchip.frontend.jax_inputs import as_constant, following, per_token_constant
from onchip.frontend.jax_types import LossStats, WithStats
from onchip.vocab.xla.tiles import TokenGradient, Tokens, TokenStats, Transform, Wanted, float16_scale

Array = jax.Array


class ClassWeights(NamedTuple):
    """What the classes of a vocabulary weigh in a loss."""

    total: Array  # []
    target: Array  # [P]: each token's target's


class TokenLoss(NamedTuple):
    """(1 - label_smoothing) * -log_prob + label_smoothing * (lse - mean(z)) + z_loss * lse**2, of one id a token.

    With class weights w, log_prob has that of the target for a factor, and lse - mean(z) is mean(w * (lse - z)).
    """

    label_smoothing: Array | None = None  # []; None for 0, as the next
    z_loss: Array | None = None

    def wanted(self, stats: bool, weighed: bool = False) -> Wanted:
        """The statistics that the loss needs, `weighed` by class, and those that the caller may have asked for."""
        even = self.label_smoothing is not None
        return Wanted(entropy=stats, argmax=stats, even=even, weighed=even and weighed)

    def value(self, stats: TokenStats, classes: ClassWeights | None = None) -> Array:
        """[P]; of rows without a token it may be anything."""
        loss = -stats.log_prob[:, 0]
        if classes is not None:
            loss *= classes.target
        if self.label_smoothing is not None and stats.even_loss is not None:
            eps = self.label_smoothing
            # At 1 the label's logit doesn't count, at 0 a masked entry's doesn't, and 0 * inf is not 0.
            loss = jnp.where(eps < 1, (1 - eps) * loss, 0) + jnp.where(eps > 0, eps * stats.even_loss, 0)
        return loss if self.z_loss is None else loss + self.z_loss * jnp.square(stats.lse)

    def gradient(
        self, stats: TokenStats, row_scale: Array, vocab: int, classes: ClassWeights | None = None
    ) -> TokenGradient:
        """row_scale * d(loss) / dz, whose `even` has class weights for factors."""
        log_prob, factor = stats.log_prob[:, 0], row_scale
        each = None if self.label_smoothing is None else self.label_smoothing / vocab
        # p - 1 as expm1(log p): -1 added to a rounded p would lose all digits of a p near 1.
        at_label = jnp.expm1(log_prob)
        if classes is not None:
            of_p = classes.target
            if self.label_smoothing is not None and each is not None:
                of_p = (1 - self.label_smoothing) * of_p + each * classes.total
            factor, at_label = row_scale * of_p, of_p * at_label
        if self.z_loss is not None:
            more = 2 * self.z_loss * stats.lse
            factor += row_scale * more
            at_label += more * jnp.exp(log_prob)
        if self.label_smoothing is not None and each is not None:
            # In one number, which is 0 for a single class.
            rest = 1 - 1 / vocab
            at_label += self.label_smoothing * rest if classes is None else each * (classes.total - classes.target)
        return TokenGradient(factor, (row_scale * at_label)[:, None], even=self.even(row_scale, vocab))

    def even(self, row_scale: Array, vocab: int) -> Array | None:
        """[P]: what label smoothing takes from the gradient by each logit, times the class's weight if there is one."""
        return None if self.label_smoothing is None else row_scale * (self.label_smoothing / vocab)


class Reduction(NamedTuple):
    """What each token's loss is multiplied by."""

    weight: Array  # [P]: 0 in rows without a token, NaN where the label is out of range
    inverse_count: Array  # []: 1 / what the mean divides by; 1 for a sum, and for one loss per token

    @staticmethod
    def of(
        tokens: Tokens, label: Array, token_weight: Array | None, normalizer: Array | None, mean: bool, dtype: Any
    ) -> "Reduction":
        """`label` is by row, `token_weight` by token; `dtype` is that of sums."""
        weight = jnp.ones(label.shape, dtype) if token_weight is None else tokens.take(token_weight, 0)
        weight = jnp.where(label == OUT_OF_RANGE, jnp.nan, jnp.where(tokens.there(), weight, 0))
        divisor: Array = jnp.ones((), dtype)
        if mean:
            divisor = jnp.maximum(tokens.number, 1).astype(dtype)
            # Without a token that counts the mean is 0, whatever the normalizer.
            divisor = divisor if normalizer is None else jnp.where(tokens.number > 0, normalizer, divisor)
        return Reduction(weight, 1 / divisor)

    def reduced(self, loss: Array, tokens: Tokens, *, per_token: bool) -> Array:
        """The mean or sum of losses by row, or each token's own."""
        loss = loss * self.weight
        return tokens.spread(loss) if per_token else tokens.sum(loss) * self.inverse_count

    def row_scale(self, upstream: Array, tokens: Tokens) -> Array:
        """[P]: the upstream gradient, [] or [T], of each row's loss."""
        upstream = upstream.astype(self.weight.dtype)
        upstream = tokens.take(upstream, 0) if upstream.ndim else upstream
        return self.weight * self.inverse_count * upstream


class Outputs(NamedTuple):
    """What forward returns."""

    loss: Array  # [], or [T] with reduction "none"
    stats: LossStats | None  # [T], if asked for

    @staticmethod
    def of_nothing(reduction: str, return_stats: bool, dtype: Any) -> "Outputs":
        """Of a call without tokens."""
        none = jnp.zeros(0, dtype)
        loss = none if reduction == "none" else jnp.zeros((), dtype)
        stats = LossStats(none, none, none, jnp.zeros(0, bool), jnp.zeros(0, jnp.int32), none)
        return Outputs(loss, stats if return_stats else None)

    def shaped(self, shape: tuple[int, ...]) -> Array | WithStats:
        """What a public function returns, for labels of this shape: the loss, or with its statistics."""
        loss = self.loss.reshape(shape) if self.loss.ndim else self.loss
        if self.stats is None:
            return loss
        return loss, jax.tree.map(lambda x: jax.lax.stop_gradient(x).reshape(shape), self.stats)


class Constants(NamedTuple):
    """The arrays of a call that get no gradient, by token."""

    labels: Array  # [T] int32 in [0, V), IGNORED or OUT_OF_RANGE
    transform: Transform
    loss: TokenLoss
    token_weight: Array | None  # [T]
    normalizer: Array | None  # []
    class_weight: Array | None  # [V]; None: there is none, or token_weight has it

    @staticmethod
    def of(
        labels: Array,
        options: Any,
        token_weight: Any,
        normalizer: Any,
        class_weight: Any,
        numbers: Mapping[str, Array | None],
        dtype: Any,
        shift: bool = False,
        axes: tuple[str, ...] = (),
    ) -> "Constants":
        """From what a public function was given, in the dtype of sums; `labels` are those of `plain_labels`, `numbers`
        the fields of `Transform` and `TokenLoss`.  The mean is over the tokens of all devices along the mesh `axes`."""
        made = Constants(
            labels.reshape(-1),
            Transform(*(numbers[name] for name in Transform._fields)),
            TokenLoss(*(numbers[name] for name in TokenLoss._fields)),
            per_token_constant(token_weight, dtype),
            as_constant(normalizer, dtype),
            as_constant(class_weight, dtype),
        )
        # Before class weights are taken at the labels.
        made = made._shifted(labels.shape) if shift else made
        if made.class_weight is not None:
            return made._weighed(options.reduction, axes)
        if axes and options.reduction == "mean" and made.normalizer is None:
            count = lax.psum(jnp.sum(made.labels != IGNORED), axes)
            return made._replace(normalizer=jnp.maximum(count, 1).astype(dtype))
        return made

    def _weighed(self, reduction: str, axes: tuple[str, ...]) -> "Constants":
        """With class weights in what the mean divides by and, where they are factors of tokens' losses, in those."""
        assert self.class_weight is not None
        of_label = jnp.where(self.labels == IGNORED, 0, self.class_weight.at[self.labels].get(mode="clip"))
        made = self
        if reduction == "mean" and self.normalizer is None:
            total = lax.psum(jnp.sum(of_label), axes) if axes else jnp.sum(of_label)
            made = made._replace(normalizer=jnp.where(total > 0, total, 1))
        if self.loss.label_smoothing is not None or self.loss.z_loss is not None:
            return made
        token_weight = of_label if self.token_weight is None else self.token_weight * of_label
        return made._replace(token_weight=token_weight, class_weight=None)

    def _shifted(self, shape: tuple[int, ...]) -> "Constants":
        """With the next position's label and weight, none at the end of each sequence; `shape` [..., S] is labels'."""

        def shifted(x: Array, last: int) -> Array:
            return following(x.reshape(shape), last).reshape(-1)

        weight = None if self.token_weight is None else shifted(self.token_weight, 0)
        return self._replace(labels=shifted(self.labels, IGNORED), token_weight=weight)

    def call(self, reduction: str, source: Any, tokens: Tokens, shard: Any = None) -> "Call":
        ids = tokens.take(self.labels, IGNORED)
        mean = reduction == "mean"
        reduced = Reduction.of(tokens, ids, self.token_weight, self.normalizer, mean, source.accumulator)
        transform = self.transform.by_row(tokens)
        return Call(source, transform, tokens, ids[:, None], self.loss, reduced, self.class_weight, shard)


class Call(NamedTuple):
    """The arrays of a call as a backend takes them, by row."""

    source: Any  # a `Projection` or `Logits`, or None where backward doesn't read it
    transform: Transform
    tokens: Tokens
    ids: Array  # [P, K] int32 in [0, V), IGNORED or OUT_OF_RANGE; K is 1 where there is a loss
    loss: Any = None  # a `TokenLoss`; None where statistics are all that is asked for, as the next
    reduction: Any = None  # a `Reduction`
    class_weight: Any = None  # [V], where the loss is weighed by it
    shard: Any = None  # a `Shard` where the source has this device's entries of the vocabulary alone

    @property
    def vocab(self) -> int:
        """Entries of the vocabulary."""
        return self.source.vocab if self.shard is None else self.shard.vocab  # type: ignore[no-any-return]

    def classes(self, ids: Array) -> ClassWeights | None:
        """Of rows with these ids [C, 1]."""
        if self.class_weight is None:
            return None
        return ClassWeights(jnp.sum(self.class_weight), self.class_weight.at[ids[:, 0]].get(mode="clip"))

    def outputs(self, reduction: str, stats: TokenStats) -> Outputs:
        spread = self.tokens.spread
        value = self.loss.value(stats, self.classes(self.ids))
        loss = self.reduction.reduced(value, self.tokens, per_token=reduction == "none")
        if stats.entropy is None:
            return Outputs(loss, None)
        assert stats.argmax is not None
        log_prob, correct = stats.log_prob[:, 0], stats.argmax == self.ids[:, 0]
        made = LossStats(stats.lse, log_prob, stats.entropy, correct, stats.argmax, log_prob + stats.lse)
        made = LossStats(*map(spread, made))
        return Outputs(loss, made._replace(argmax=jnp.where(self.tokens.kept, made.argmax, -1)))

    def scaled_rows(self, upstream: Array) -> tuple[Array, Array | None]:
        """[P]: the factor of each row's gradient by the linear layer's logits; and how much of it float16 needs."""
        row_scale, factor = self.reduction.row_scale(upstream, self.tokens), self.transform.factor()
        row_scale = row_scale if factor is None else row_scale * factor
        size, classes = jnp.abs(row_scale), self.classes(self.ids)
        if classes is not None:
            size *= classes.target + classes.total / self.vocab
        grad_scale = float16_scale(size, self.source.hidden.dtype)
        return row_scale if grad_scale is None else row_scale * grad_scale, grad_scale

    def gradient(self, stats: TokenStats, upstream: Array) -> TokenGradient:
        """By the final logits, for an upstream gradient [] or [T]."""
        row_scale = self.reduction.row_scale(upstream, self.tokens)
        classes = self.classes(self.ids)
        return self.loss.gradient(stats, row_scale, self.vocab, classes)  # type: ignore[no-any-return]
