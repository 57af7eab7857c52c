"""Flax's output layers with onchip's loss: `LinearHead` and `EmbedHead` for nnx, `DenseHead` for linen.

Each is Flax's own layer, with its arguments, its parameters and their names, so that checkpoints load.  It gives logits
as the layer does.  With labels it gives the loss by `onchip.jax.linear_cross_entropy`, which doesn't store the logits.
"""

from typing import Any

from onchip.core.machine import naming_extra

with naming_extra("onchip.integrations.flax", "jax,integrations"):
    import jax
    from flax import linen, nnx

from onchip.frontend.jax_types import Array
from onchip.frontend.topk import TopK
from onchip.jax import linear_cross_entropy


class LinearHead(nnx.Linear):
    """`nnx.Linear` as a language model's head: logits, or with labels the loss.

    Its arguments and parameters (`kernel` [H, V], `bias` [V]) are those of `nnx.Linear`.  The loss reads the kernel as
    it lies.  The head computes in the dtype that `nnx.Linear` takes, from `dtype`, the input and the parameters.  The
    loss's logits are float32 in any case; `precision` and `preferred_element_type` change only the logits that the head
    returns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from onchip.integrations.flax import LinearHead
        >>> head = LinearHead(16, 100, use_bias=False, rngs=nnx.Rngs(0))
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> head(hidden).shape
        (2, 8, 100)
        >>> labels = jnp.arange(16).reshape(2, 8)
        >>> loss, grads = nnx.value_and_grad(lambda head: head(hidden, labels, shift=False))(head)
        >>> grads["kernel"].shape
        (16, 100)

    Source: `flax/nnx/nn/linear.py`.
    """

    def __call__(
        self, inputs: Array, labels: Array | TopK[Array] | None = None, *, out_sharding: object = None, **options: Any
    ) -> Any:
        """Logits, or with labels the loss.

        Args:
            inputs: [..., H].
            labels: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.
            out_sharding: of the logits, as `nnx.Linear` takes it.
            shift: must be given with labels: True where they are those that the data has, so that position i predicts
                label i + 1; False where position i is to predict label i.
            options: of `onchip.jax.linear_cross_entropy`: `ignore_index`, `reduction`, `label_smoothing`,
                `softcap`, and so on.

        Returns:
            Without labels [..., V] logits, as `nnx.Linear` gives them.  With labels what `linear_cross_entropy`
            returns.

        Raises:
            TypeError, ValueError: what `linear_cross_entropy` raises; options without labels; labels without `shift`;
                with labels an `out_sharding`, an argument that is the layer's own, or a layer with a `dot_general` of
                its own.

        Memory: with labels that of `linear_cross_entropy`, and a copy of the kernel where its dtype isn't the one that
        the head computes in.
        """
        if labels is None:
            _check_logits("LinearHead", options)
            return super().__call__(inputs, out_sharding=out_sharding)
        _check_loss("LinearHead", options, out_sharding, self.dot_general is not jax.lax.dot_general)
        bias = None if self.bias is None else self.bias[...]
        hidden, kernel, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        return linear_cross_entropy(hidden, kernel, bias=bias, labels=labels, weight_layout="hv", **options)


class EmbedHead(nnx.Embed):
    """`nnx.Embed` whose `attend` is a language model's tied head: logits, or with labels the loss.

    Its arguments and its parameter (`embedding` [V, H]) are those of `nnx.Embed`, and called with ids it embeds them.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from onchip.integrations.flax import EmbedHead
        >>> embed = EmbedHead(100, 16, rngs=nnx.Rngs(0))
        >>> ids = jnp.arange(16).reshape(2, 8)
        >>> hidden = embed(ids)
        >>> embed.attend(hidden).shape
        (2, 8, 100)
        >>> embed.attend(hidden, ids, shift=True).shape
        ()

    Source: `flax/nnx/nn/linear.py`.
    """

    def attend(
        self, query: Array, labels: Array | TopK[Array] | None = None, *, out_sharding: object = None, **options: Any
    ) -> Any:
        """Logits, or with labels the loss.

        Args:
            query: [..., H], the last layer's output.
            labels: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.
            out_sharding: of the logits, as `nnx.Embed.attend` takes it.
            shift: must be given with labels, as in `LinearHead`.
            options: of `onchip.jax.linear_cross_entropy`, as in `LinearHead`.

        Returns:
            Without labels [..., V] logits, as `nnx.Embed.attend` gives them.  With labels what `linear_cross_entropy`
            returns.

        Raises:
            TypeError, ValueError: as `LinearHead`.

        Memory: as `LinearHead`.
        """
        if labels is None:
            _check_logits("EmbedHead.attend", options)
            return super().attend(query, out_sharding=out_sharding)
        _check_loss("EmbedHead.attend", options, out_sharding)
        hidden, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        return linear_cross_entropy(hidden, embedding, labels=labels, **options)


class DenseHead(linen.Dense):
    """`linen.Dense` as a language model's head: logits, or with labels the loss.

    Its attributes and parameters (`kernel` [H, V], `bias` [V]) are those of `linen.Dense`.  Else it is as `LinearHead`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.integrations.flax import DenseHead
        >>> head = DenseHead(100, use_bias=False)
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> variables = head.init(jax.random.key(1), hidden)
        >>> head.apply(variables, hidden, jnp.arange(16).reshape(2, 8), shift=True).shape
        ()

    Source: `flax/linen/linear.py`.
    """

    @linen.compact
    def __call__(self, inputs: Array, labels: Array | TopK[Array] | None = None, **options: Any) -> Any:
        """Logits, or with labels the loss.

        Args:
            inputs: [..., H].
            labels: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.
            shift: must be given with labels, as in `LinearHead`.
            options: of `onchip.jax.linear_cross_entropy`, as in `LinearHead`.

        Returns:
            Without labels [..., V] logits, as `linen.Dense` gives them.  With labels what `linear_cross_entropy`
            returns.

        Raises:
            TypeError, ValueError: as `LinearHead`.

        Memory: as `LinearHead`.
        """
        if labels is None:
            _check_logits("DenseHead", options)
            return super().__call__(inputs)
        own_product = self.dot_general not in (None, jax.lax.dot_general) or self.dot_general_cls is not None
        _check_loss("DenseHead", options, None, own_product)
        shape = inputs.shape[-1], self.features
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        hidden, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return linear_cross_entropy(hidden, kernel, bias=bias, labels=labels, weight_layout="hv", **options)


def _check_logits(name: str, options: dict[str, Any]) -> None:
    """Raise for options of the loss in a call that gives logits."""
    if options:
        raise TypeError(f"{name}: {', '.join(options)}: options of the loss; pass labels too")


def _check_loss(name: str, options: dict[str, Any], out_sharding: Any, own_product: bool = False) -> None:
    """Raise for what a call that gives the loss can't follow."""
    own = [option for option in ("hidden", "weight", "bias", "weight_layout") if option in options]
    if own:
        raise TypeError(f"{name}: {', '.join(own)}: the layer gives this to the loss; leave it out")
    if out_sharding is not None:
        raise ValueError(f"{name}: out_sharding is of logits, which the loss doesn't store; leave it out with labels")
    if own_product:
        raise ValueError(
            f"{name}: the layer has a dot_general of its own, which the loss can't compute with; "
            "compute the loss from the logits, or leave dot_general out"
        )
    if "shift" not in options:
        raise TypeError(
            f"{name}: with labels shift must be given: shift=True if they are as the data has them, so that position i "
            "predicts label i + 1, or shift=False if position i is to predict label i"
        )
