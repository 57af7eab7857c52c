"""MaxText's loss through onchip, where `num_vocab_tiling` is above 1.

In that case MaxText 0.2.5 passes the last layer's hidden states to `vocab_tiling_nnx_loss`.  `install()` replaces that
function, and `uninstall()` restores MaxText's own.
"""

import importlib
from functools import partial
from typing import Any

from onchip.core.machine import naming_extra

with naming_extra("onchip.integrations.maxtext", "jax,integrations"):
    import jax
    from flax import nnx

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from onchip.frontend.jax_types import Array
from onchip.frontend.options import LossTerms
from onchip.integrations.maxtext_attention import install_attention as install_attention
from onchip.integrations.maxtext_attention import uninstall_attention as uninstall_attention
from onchip.integrations.replacing import Installed, Ours, Replacing
from onchip.integrations.versions import require
from onchip.jax import linear_cross_entropy
from onchip.vocab.loss import loss_of_lse

NAME = "onchip.integrations.maxtext"
VERSION = "0.2.5"
"""Of MaxText, whose function this is.  Versions before it also have one for Linen."""

TOKENS = ("activation_embed_and_logits_batch", "activation_length")
"""MaxText's names of the dimensions [B, S] of its loss."""

IGNORED = -(2**31)
"""The label of tokens of segment 0."""


def vocab_tiling_nnx_loss(
    model: Any, hidden_states: Array, data: dict[str, Array], config: Any, is_train: bool
) -> tuple[jax.Array, jax.Array]:
    """The replacement of MaxText's function: it returns (loss, z-loss), both float32 sums over the tokens that count.

    With y = dropout(decoder_norm(hidden_states)) and lse = log(sum(exp(z)))::

        z = y @ logits_dense.kernel, or with logits_via_embedding  c * tanh(y @ bfloat16(embedding).T / sqrt(H) / c)
        z-loss = sum(z_loss_multiplier * lse**2)
        loss = sum(lse - z[target]) + z-loss

    over the tokens whose segment isn't 0; c is `final_logits_soft_cap`, and only `normalize_embedding_logits` divides
    by sqrt(H).  The loss has gradients with respect to hidden_states and the model's parameters; the z-loss has none.
    Logits are float32, whatever `cast_logits_to_fp32` says.  Hidden states and head are multiplied in the model's
    dtype, but in float32 if `logits_dot_in_fp32` is set and the head isn't tied; onchip's kernels don't take that.

    Args:
        model: MaxText's `Transformer`.
        hidden_states: [B, S, H], before the final norm.
        data: "targets" [B, S] integers in [0, V), and "targets_segmentation" [B, S], 0 for a token that doesn't count.
            If a token that counts has any other target, its loss is NaN under jit.
        config: MaxText's.  `num_vocab_tiling` and `vocab_tiling_ag_once` change nothing.
        is_train: whether there is dropout, if `enable_dropout` is set.  It is drawn for all tokens at once.

    Raises:
        ValueError: sharding is explicit; the mesh has an axis that shards something other than tokens, as tensor
            parallelism does; the head isn't MaxText's own; or shapes are wrong.
        TypeError: what `linear_cross_entropy` raises.

    Memory: that of `linear_cross_entropy`, and a copy of the head in the dtype that it computes in.  Each of several
    devices has its own tokens and the whole head.

    Source: MaxText 0.2.5, `maxtext/utils/vocabulary_tiling.py` and `maxtext/layers/nnx_decoders.py`.
    """
    labels, segments = data["targets"], data["targets_segmentation"]
    if hidden_states.ndim != 3 or not hidden_states.shape[:2] == labels.shape == segments.shape:
        shapes = list(hidden_states.shape), list(labels.shape), list(segments.shape)
        raise ValueError(
            f"{NAME}: hidden_states are {shapes[0]}, targets {shapes[1]} and targets_segmentation {shapes[2]}; they "
            "must be [B, S, H], [B, S] and [B, S]"
        )
    _require_known(model, config)
    tokens = _token_axes(model.mesh)
    deterministic = not (is_train and config.enable_dropout)
    hidden = model.decoder.dropout(model.decoder.decoder_norm(hidden_states), deterministic=deterministic)
    hidden, weight, options = _head(model, hidden, config)
    labels = jnp.where(segments != 0, labels, IGNORED)
    loss: Any = partial(_sums, axes=_names(tokens), z_loss=config.z_loss_multiplier, options=options)
    if model.mesh.size > 1:
        # Each device has its tokens and the whole head, whose gradient JAX sums over them.  The kernels' outputs don't
        # say over which axes they vary.
        loss = jax.shard_map(
            loss, mesh=model.mesh, in_specs=(P(*tokens, None), P(), tokens), out_specs=(P(), P()), check_vma=False
        )
    sums: tuple[jax.Array, jax.Array] = loss(hidden, weight, labels)
    return sums


def _sums(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    axes: tuple[str, ...],
    z_loss: float,
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """The loss and the z-loss in it, of the tokens of all devices along the axes."""
    loss_of = partial(
        linear_cross_entropy, hidden, weight, labels, ignore_index=IGNORED, reduction="sum", z_loss=z_loss, **options
    )
    total_z_loss = jnp.zeros((), jnp.float32)
    if z_loss:
        loss, stats = loss_of(return_stats=True)
        each = loss_of_lse(jnp, LossTerms(z_loss=z_loss), stats.lse)
        total_z_loss = jnp.sum(jnp.where(labels == IGNORED, 0, each))
    else:
        loss = loss_of()
    return jax.lax.psum((loss, total_z_loss), axes) if axes else (loss, total_z_loss)


def _head(model: Any, hidden: jax.Array, config: Any) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Hidden states and head in the dtype that MaxText multiplies them in, and what it does with the product."""
    if config.logits_via_embedding:
        # Rounded to bfloat16 whatever the model's dtype, as MaxText's `attend_on_embedding` does.
        weight = _parameter(model.token_embedder, "embedding", config).astype(jnp.bfloat16)
        dtype = jnp.promote_types(hidden.dtype, weight.dtype)
        options = {
            "logit_scale": hidden.shape[-1] ** -0.5 if config.normalize_embedding_logits else 1.0,
            "softcap": config.final_logits_soft_cap or None,
        }
    else:
        # MaxText has no softcap here, whatever final_logits_soft_cap says.
        weight = _parameter(model.decoder.logits_dense, "kernel", config)
        dtype, options = model.decoder.logits_dense.dtype, {"weight_layout": "hv"}
    return hidden.astype(dtype), weight.astype(dtype), options


def _parameter(layer: Any, name: str, config: Any) -> jax.Array:
    """The layer's only parameter, on the device; raise if it has others, which change the logits."""
    others = sorted(str(key) for key in nnx.state(layer, nnx.Param) if key != name)
    if others:
        raise ValueError(
            f"{NAME}: the head has {', '.join(others)} besides {name}, as with a bias, FP8 weights or LoRA; leave the "
            "head out of these, or use MaxText's own loss (uninstall)"
        )
    value: jax.Array = getattr(layer, name).get_value()
    return jax.device_put(value, jax.memory.Space.Device) if config.parameter_memory_host_offload else value


KNOWN_METHODS = {
    "logits_from_hidden_states_for_vocab_tiling": "maxtext.models.models",
    "apply_output_head": "maxtext.layers.nnx_decoders",
}
"""How MaxText makes logits of hidden states, and where that stands: what is followed here."""


def _require_known(model: Any, config: Any) -> None:
    """Raise for what isn't followed here."""
    if config.shard_mode.value == "explicit":
        raise ValueError(f"{NAME}: this loss doesn't support explicit sharding; set shard_mode to 'auto'")
    for owner, (name, home) in zip((model, getattr(model, "decoder", None)), KNOWN_METHODS.items(), strict=True):
        method = getattr(type(owner), name, None)
        if getattr(method, "__module__", None) != home:
            raise ValueError(
                f"{NAME}: {type(owner).__name__} has no {name} of {home}, so its logits may differ; use MaxText's own "
                "loss (uninstall)"
            )


def _token_axes(mesh: Any) -> P:
    """The mesh's axes over which MaxText shards [B, S]; raise if it shards something else too."""
    if mesh.size == 1:
        return P()
    spec = importlib.import_module("maxtext.utils.sharding").create_sharding(mesh, TOKENS).spec
    tokens = P(*(*spec, None, None)[:2])  # it may be empty
    others = [f"{name} (of {size})" for name, size in mesh.shape.items() if size > 1 and name not in _names(tokens)]
    if others:
        raise ValueError(
            f"{NAME}: this loss shards only tokens, but the mesh has {', '.join(others)}; set the parallelism of that "
            "axis to 1, as ici_tensor_parallelism=1, or use MaxText's own loss (uninstall)"
        )
    return tokens


def _names(spec: P) -> tuple[str, ...]:
    """The mesh's axes in a PartitionSpec."""
    parts = [(part,) if isinstance(part, str) else part or () for part in spec]
    return tuple(name for part in parts for name in part)


_REPLACING = Replacing(
    "maxtext",
    "reinstall maxtext",
    {
        "vocab_tiling_nnx_loss": Ours(
            "maxtext.utils.vocabulary_tiling",
            vocab_tiling_nnx_loss,
            ("model", "hidden_states", "data", "config", "is_train"),
        )
    },
)


def install() -> Installed:
    """Let MaxText compute its loss by `linear_cross_entropy` if `num_vocab_tiling` is above 1.

    In each loaded module of MaxText that holds `vocab_tiling_nnx_loss`, onchip's function replaces it; modules that are
    loaded later find onchip's.  A further call does that for modules that were loaded in between.  Call it before the
    first step is compiled.  With `num_vocab_tiling` 1 MaxText computes logits, and nothing changes.

    In float32, loss and gradients are MaxText's up to rounding.  In bfloat16 MaxText rounds the logits, unless
    `logits_dot_in_fp32`, and onchip doesn't.

    Returns:
        What was replaced.

    Raises:
        ModuleNotFoundError: MaxText isn't installed.
        RuntimeError: MaxText's version isn't 0.2.5, or its function isn't the one that onchip knows, or something else
            has replaced it.  Then nothing is replaced.

    Memory: as in `linear_cross_entropy`, with the whole head on each device.

    Example, a script that trains with the arguments of `maxtext.trainers.pre_train.train`::

        from absl import app
        from maxtext.trainers.pre_train import train
        from onchip.integrations import maxtext

        maxtext.install()
        app.run(train.main)

    Source: MaxText 0.2.5, `maxtext/utils/vocabulary_tiling.py`.
    """
    version = require("maxtext", "maxtext", VERSION)
    what = f"MaxText {version} with num_vocab_tiling above 1"
    return Installed(version, _REPLACING.install(f"MaxText {version}"), what=what)


def uninstall() -> None:
    """Restore MaxText's function in each module that holds onchip's.  Without an earlier `install` it does nothing.

    Example:
        >>> from onchip.integrations.maxtext import uninstall
        >>> uninstall()
    """
    _REPLACING.uninstall()
