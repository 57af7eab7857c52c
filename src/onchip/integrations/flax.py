"""Flax's output layers with onchip's loss: `LinearHead` and `EmbedHead` for nnx, `DenseHead` for linen; its attention
layers with onchip's attention; linear layers in FP8 and mixtures of experts, from flax_layers.py.

Each head is Flax's own layer, with its arguments, its parameters and their names, so that checkpoints load.  It gives
logits as the layer does.  With labels it gives the loss by `onchip.jax.linear_cross_entropy`, which doesn't store the
logits.
"""

from typing import Any, Literal

from onchip.core.machine import naming_extra

with naming_extra("onchip.integrations.flax", "jax,integrations"):
    import jax
    import jax.numpy as jnp
    from flax import linen, nnx

from onchip.frontend.jax_types import Array
from onchip.frontend.topk import TopK
from onchip.integrations.flax_layers import Fp8Dense as Fp8Dense
from onchip.integrations.flax_layers import Fp8Linear as Fp8Linear
from onchip.integrations.flax_layers import LinenMoE as LinenMoE
from onchip.integrations.flax_layers import MoE as MoE
from onchip.jax import dot_product_attention, linear_cross_entropy
from onchip.masks import Mask


class LinearHead(nnx.Linear):
    """`nnx.Linear` as a language model's head: logits, or with labels the loss.

    Its arguments and parameters (`kernel` [H, V], `bias` [V]) are those of `nnx.Linear`.  The loss reads the kernel in
    place.  The head computes in the dtype that `nnx.Linear` derives from `dtype`, the input and the parameters.  The
    loss's logits are always float32; `precision` and `preferred_element_type` change only the logits that the head
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
            labels: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`; or soft labels.
            out_sharding: sharding of the logits, as in `nnx.Linear`.
            shift: must be given with labels: True if they are as the data has them, so that position i predicts label
                i + 1; False if position i is to predict label i.
            options: arguments of `onchip.jax.linear_cross_entropy`: `ignore_index`, `reduction`, `label_smoothing`,
                `softcap` and so on.

        Returns:
            Without labels the logits [..., V], as `nnx.Linear` returns them.  With labels what `linear_cross_entropy`
            returns.

        Raises:
            TypeError, ValueError: what `linear_cross_entropy` raises.  Also for options without labels, and for labels
                without `shift`, with an `out_sharding`, with an argument that the layer itself passes, or on a layer
                with its own `dot_general`.

        Memory: with labels that of `linear_cross_entropy`, and a copy of the kernel if its dtype isn't the one that the
        head computes in.
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
            labels: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`; or soft labels.
            out_sharding: sharding of the logits, as in `nnx.Embed.attend`.
            shift: must be given with labels, as in `LinearHead`.
            options: arguments of `onchip.jax.linear_cross_entropy`, as in `LinearHead`.

        Returns:
            Without labels the logits [..., V], as `nnx.Embed.attend` returns them.  With labels what
            `linear_cross_entropy` returns.

        Raises:
            TypeError, ValueError: as `LinearHead`.

        Memory: that of `LinearHead`.
        """
        if labels is None:
            _check_logits("EmbedHead.attend", options)
            return super().attend(query, out_sharding=out_sharding)
        _check_loss("EmbedHead.attend", options, out_sharding)
        hidden, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        return linear_cross_entropy(hidden, embedding, labels=labels, **options)


class DenseHead(linen.Dense):
    """`linen.Dense` as a language model's head: logits, or with labels the loss.

    Its attributes and parameters (`kernel` [H, V], `bias` [V]) are those of `linen.Dense`.  Otherwise it is like
    `LinearHead`.

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
            labels: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`; or soft labels.
            shift: must be given with labels, as in `LinearHead`.
            options: arguments of `onchip.jax.linear_cross_entropy`, as in `LinearHead`.

        Returns:
            Without labels the logits [..., V], as `linen.Dense` returns them.  With labels what `linear_cross_entropy`
            returns.

        Raises:
            TypeError, ValueError: as `LinearHead`.

        Memory: that of `LinearHead`.
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
        raise TypeError(f"{name}: options of the loss need labels; got {', '.join(options)} without them")


def _check_loss(name: str, options: dict[str, Any], out_sharding: Any, own_product: bool = False) -> None:
    """Raise for what a call that gives the loss can't follow."""
    own = [option for option in ("hidden", "weight", "bias", "weight_layout") if option in options]
    if own:
        raise TypeError(f"{name}: the layer itself passes {', '.join(own)} to the loss; leave out what you passed")
    if out_sharding is not None:
        raise ValueError(f"{name}: out_sharding is for logits, which the loss doesn't store; leave it out with labels")
    if own_product:
        raise ValueError(
            f"{name}: the layer has a dot_general of its own, which the loss can't use; compute the loss from the "
            "logits, or leave out dot_general"
        )
    if "shift" not in options:
        raise TypeError(
            f"{name}: with labels shift must be given: shift=True if they are as the data has them, so that position i "
            "predicts label i + 1, or shift=False if position i is to predict label i"
        )


def attention_fn(
    query: Array,  # [..., T, N, H]
    key: Array,  # [..., S, N, H]
    value: Array,  # [..., S, N, H]
    bias: None = None,
    mask: Mask | Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: object = None,
    dropout_rate: float = 0.0,
    deterministic: bool = True,
    dtype: Any = None,
    precision: object = None,
    module: None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,  # [N]
    backend: Literal["auto", "mosaic_gpu", "xla"] = "auto",
) -> jax.Array:
    r"""`onchip.jax.attention` as `attention_fn=` of `nnx.MultiHeadAttention` and of linen's, which calls it.

    Pass a mask of `onchip.masks` to the layer in place of an array, and options that Flax doesn't know by
    `functools.partial(attention_fn, softcap=30.0)`.

    Args:
        query: [..., T, N, H].
        key, value: [..., S, N, H].
        bias: None, as scores have no bias here.
        mask: one of `onchip.masks`, or an array [..., 1, T, S] as Flax makes it, or [T, S], the same for all heads, 0
            where a query doesn't see a key.  An array takes the backend "xla".
        broadcast_dropout, dropout_rng: not used.
        dropout_rate: of the probabilities; if it is above 0, the call must be deterministic.
        deterministic: True for no dropout.
        dtype: the dtype to which query, key and value are cast; None for the one that they promote to.
        precision: not used, as sums are in float32.
        module: None, as probabilities are never in memory and so can't be kept.
        is_causal: whether query i sees only keys up to i, among those that the mask lets it see.
        scale, softcap, sinks, backend: as in `onchip.jax.attention`.

    Returns:
        [..., T, N, H].  If a query sees nothing, its result is 0, whereas Flax returns the mean of all values.

    Raises:
        TypeError: the mask has another type, or what `onchip.jax.attention` raises.
        ValueError: there is a bias, dropout or a module, or the mask differs between heads.

    Memory: that of `onchip.jax.attention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from onchip.integrations.flax import attention_fn
        >>> from onchip.masks import Causal, Documents
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=2, in_features=16, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
        ... )
        >>> layer(jnp.ones((1, 6, 16)), mask=Documents(jnp.array([0, 0, 0, 1, 1, 1])) & Causal()).shape
        (1, 6, 16)

    Source: `flax/nnx/nn/attention.py`.
    """
    if bias is not None:
        raise ValueError("attention_fn: bias must be None, as scores have no bias here; leave out attention_fn=")
    if dropout_rate > 0 and not deterministic:
        raise ValueError(
            f"attention_fn: dropout_rate must be 0 in training, as there is no dropout here; got {dropout_rate}"
        )
    if module is not None:
        raise ValueError("attention_fn: sow_weights must be False, as probabilities are never in memory")
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    folded = [jnp.asarray(x, dtype).reshape(-1, *x.shape[-3:]) for x in (query, key, value)]
    before, shown = query.shape[:-3], mask
    if mask is not None and not isinstance(mask, Mask):
        seen = jnp.asarray(mask) != 0
        seen = seen[None] if seen.ndim == 2 else seen
        shown = jnp.broadcast_to(seen, (*before, *seen.shape[-3:])).reshape(-1, *seen.shape[-3:])
    out: Any = dot_product_attention(
        folded[0],
        folded[1],
        folded[2],
        mask=shown,
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        implementation=backend,
    )
    return jnp.reshape(out, (*before, *query.shape[-3:]))
