"""MaxText's attention through onchip, where `attention` is "cudnn_flash_te".

There MaxText 0.2.5 calls Transformer Engine.  `install_attention()` lets `onchip.jax.attention` compute it.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from onchip.attention.masks import Causal, Chunked, Documents, Full, Mask, Window
from onchip.integrations.replacing import Installed, Ours, Replacing
from onchip.integrations.versions import require
from onchip.jax import attention

NAME = "onchip.integrations.maxtext"
VERSION = "0.2.5"
HOME = "maxtext.layers.attention_op"
KERNEL = "cudnn_flash_te"
ANOTHER = "set attention to 'dot_product' or another kernel of MaxText's, or call uninstall_attention()"

METHOD = "AttentionOp.apply_attention"


def apply_attention(
    self: Any,
    query: Any,
    key: Any,
    value: Any,
    decoder_segment_ids: jax.Array | None,
    segment_positions: Any,
    lengths: Any,
    model_mode: str,
    use_ragged_attention: bool = False,
    previous_chunk: Any = None,
    bidirectional_mask: Any = None,
    sinks: jax.Array | None = None,
    indexer_mask: Any = None,
    compressed_mask: Any = None,
    record_max_logits: bool = False,
    decoder_segment_ids_kv: Any = None,
    pad_kv_total: int = 0,
    compress_ratio: int = 0,
    *,
    qk_product_einsum: Any,
    wv_product_einsum: Any,
) -> Any:
    """What stands for `AttentionOp.apply_attention`: (attention, None, None), or MaxText's own with another kernel.

    Queries are scaled already, as MaxText does it.  Of the layer these are followed: attention_type ('global', 'mla',
    'full', 'local_sliding' and 'chunk'), sliding_window_size, chunk_attn_window_size and attn_logits_soft_cap.
    Scores are float32, whatever float32_logits and float32_qk_product say.

    Args:
        query: [B, S, N, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        decoder_segment_ids: [B, S] or None.  Tokens of a segment must be next to each other; a negative id sees
            nothing.
        sinks: [N] or None.

    The others are refused where they aren't None, 0 or False, but for what attention in training doesn't read.

    Raises:
        NotImplementedError: what onchip doesn't follow: decoding, dropout, another attention_type, MoBA, quantised
            keys, context parallelism, or another mask.
        TypeError, ValueError: what `onchip.jax.attention` raises.

    Source: MaxText 0.2.5, `maxtext/layers/attention_op.py`.
    """
    others = {
        "previous_chunk": previous_chunk,
        "bidirectional_mask": bidirectional_mask,
        "indexer_mask": indexer_mask,
        "compressed_mask": compressed_mask,
        "decoder_segment_ids_kv": decoder_segment_ids_kv,
    }
    numbers = {"record_max_logits": record_max_logits, "pad_kv_total": pad_kv_total, "compress_ratio": compress_ratio}
    if self.attention_kernel != KERNEL:
        return _REPLACING.originals[METHOD](
            self, query, key, value, decoder_segment_ids, segment_positions, lengths, model_mode,
            use_ragged_attention=use_ragged_attention, sinks=sinks, **others, **numbers,
            qk_product_einsum=qk_product_einsum, wv_product_einsum=wv_product_einsum,
        )  # fmt: skip
    refused = [name for name, x in others.items() if x is not None] + [name for name, x in numbers.items() if x]
    refused += [f"model_mode {model_mode!r}"] if model_mode != "train" else []
    refused += ["moba"] if self.config.moba else []
    refused += ["dropout_rate above 0"] if self.dropout_rate > 0 and self.config.enable_dropout else []
    refused += ["quantised keys"] if not all(isinstance(x, jax.Array) for x in (key, value)) else []
    refused += ["context parallelism"] if self._context_parallel_size() > 1 else []
    if refused:
        raise NotImplementedError(f"{NAME}: attention has no {', '.join(refused)}; {ANOTHER}")
    made = attention(
        query,
        key,
        value,
        _mask_of(self, decoder_segment_ids),
        scale=1.0,
        softcap=self.attn_logits_soft_cap or None,
        sinks=sinks,
    )
    return made, None, None


def _mask_of(layer: Any, segments: jax.Array | None) -> Mask:
    """onchip's of a layer's attention_type."""
    kind = layer.attention_type.value
    masks: dict[str, Any] = {"global": Causal, "mla": Causal, "full": Full}
    if kind in masks:
        made: Mask = masks[kind]()
    elif kind == "local_sliding":
        made = Window(layer.sliding_window_size - 1)
    elif kind == "chunk":
        made = Chunked(layer.chunk_attn_window_size) & Causal()
    else:
        raise NotImplementedError(f"{NAME}: attention has no attention_type {kind!r}; {ANOTHER}")
    return made if segments is None else made & Documents(jnp.maximum(segments, -1), padding=-1)


PARAMETERS = tuple(inspect.signature(apply_attention).parameters)[1:]  # without self
_REPLACING = Replacing("maxtext", "reinstall maxtext", {METHOD: Ours(HOME, apply_attention, PARAMETERS)})


def install_attention() -> Installed:
    """Let MaxText's attention be computed by `onchip.jax.attention` where `attention` is "cudnn_flash_te".

    onchip's stands in the place of Transformer Engine's, which needn't be installed; other kernels stay MaxText's.
    Causal and full attention, packed segments, sliding windows, Llama 4's chunks, softcaps, sinks and heads whose
    values have another size are computed.  Anything else raises, and doesn't fall back.  Called again it does nothing
    new.  Call it before the first step is compiled.

    Returns:
        What was replaced.

    Raises:
        ModuleNotFoundError: MaxText isn't installed.
        RuntimeError: MaxText's version isn't 0.2.5, or its method isn't what onchip knows.  Then nothing is replaced.

    Memory: that of `onchip.jax.attention`.

    Example, before MaxText's trainer starts, with attention=cudnn_flash_te among its arguments::

        from onchip.integrations import maxtext

        maxtext.install_attention()

    Source: MaxText 0.2.5, `maxtext/layers/attention_op.py`.
    """
    version = require("maxtext", "maxtext", VERSION)
    what = f"MaxText {version} with attention {KERNEL!r}"
    return Installed(version, _REPLACING.install(f"MaxText {version}"), what=what)


def uninstall_attention() -> None:
    """Put MaxText's own back.  Without `install_attention` before it does nothing.

    Example:
        >>> from onchip.integrations.maxtext import uninstall_attention
        >>> uninstall_attention()
    """
    _REPLACING.uninstall()
