"""Levanter's attention through onchip: `install_attention()` replaces the function that calls Transformer Engine.

Levanter's `dot_product_attention` calls that function if `attn_backend` is "nvte", which is the default on GPUs.
"""

import importlib
import importlib.util
import inspect
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from onchip.attention.masks import Causal, Documents, Full, Intervals, Mask, Window, check_mask_values
from onchip.integrations.replacing import Installed, Ours, Replacing
from onchip.jax import attention

NAME = "onchip.integrations.levanter"
ANOTHER = "set attn_backend to 'vanilla' or 'jax_flash' for this model, or call uninstall_attention()"
KNOWN = ("is_causal", "causal_offset", "segment_ids", "sliding_window", "bidirectional_window")
"""The fields of Levanter's `AttentionMask` that are ranges."""


def named_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    dropout: float = 0.0,
    inference: bool = False,
    *,
    prng: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    flash_block_size: int | None = None,
    force_te: bool = False,
    scaling_factor: float | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: Any = None,
) -> Any:
    """The function that `install_attention` puts in: `onchip.jax.attention` for Haliax's named arrays.

    A query that sees nothing has 0, where Levanter's plain attention has the mean of all values.  A sink is neither
    scaled nor capped, as in Levanter's flash attention.

    Args:
        QPos: the axis of the queries' positions, or its name.
        KPos: the axis of the keys' positions.
        Key: the axis of the numbers of a head.
        query: with the axes QPos and Key, and axes for the batch and the heads.
        key: with KPos in place of QPos, and without the axes of query heads that share a key head.
        value: as key; its last axis may be another.
        mask: None, or Levanter's `AttentionMask` without an explicit mask.  The tokens of a segment must be next to
            each other; where ids can be read on the CPU, others raise.
        bias: None.
        dropout: 0, unless `inference`.
        inference: whether there is no dropout.
        prng: not used.
        attention_dtype: what query, key and value are cast to; None: their own.
        precision: not used: sums are in float32.
        flash_block_size: not used.
        force_te: not used.
        scaling_factor: factor of the products; None: 1 / sqrt of Key's size.
        logits_soft_cap: above 0, or None.
        attn_sink: a score without a value, with axes of the heads.

    Returns:
        The query's axes without Key, and the value's own.

    Raises:
        NotImplementedError: a bias, dropout, an explicit mask, or a field of `AttentionMask` that onchip doesn't know.
        ValueError: an axis of a mask or sink that isn't there; what `onchip.jax.attention` raises.

    Memory: that of `onchip.jax.attention`.

    Source: Levanter, `levanter/layers/attention.py`.
    """
    if bias is not None:
        raise NotImplementedError(f"{NAME}: attention has no bias; {ANOTHER}")
    if dropout and not inference:
        raise NotImplementedError(f"{NAME}: attention has no dropout; set the model's attn_pdrop to 0, or {ANOTHER}")
    at, of_keys, size = query.resolve_axis(QPos), key.resolve_axis(KPos), query.resolve_axis(Key)
    shared = [x for x in query.axes if x not in (at, size) and x in key.axes]
    offset, ids = getattr(mask, "causal_offset", None), getattr(mask, "segment_ids", None) or ()
    of_mask = {x.name for array in (offset, *ids) if array is not None for x in array.axes}
    # The last axis that queries and keys share and the mask hasn't is the keys' heads; the others may be a batch.
    of_heads = [x for x in shared if x.name not in of_mask][-1:]
    batch = [x for x in shared if x not in of_heads]
    heads = [*of_heads, *(x for x in query.axes if x not in (at, size) and x not in shared)]
    own = [x for x in value.axes if x != of_keys and x not in shared]
    if len(own) != 1:
        raise ValueError(f"{NAME}: value must have one axis besides {of_keys}, batch and heads; got {value.axes}")
    dtype = query.dtype if attention_dtype is None else attention_dtype
    q, k, v = (
        _rows(x.astype(dtype), batch, inner, last)
        for x, inner, last in (
            (query, heads, (at, size)),
            (key, of_heads, (of_keys, size)),
            (value, of_heads, (of_keys, own[0])),
        )
    )
    made = attention(
        q,
        k,
        v,
        _mask_of(mask, batch, at, of_keys),
        scale=scaling_factor,
        softcap=logits_soft_cap,
        sinks=None if attn_sink is None else _rows(attn_sink, (), heads, ())[0],
        layout="bhtd",
    )
    axes = (*batch, *heads, at, own[0])
    out = importlib.import_module("haliax").named(made.reshape([x.size for x in axes]), axes)
    asked = (*(x for x in query.axes if x != size), own[0])
    return out.rearrange(asked).astype(jnp.promote_types(query.dtype, value.dtype))


def _rows(array: Any, batch: Sequence[Any], heads: Sequence[Any], last: Sequence[Any]) -> jax.Array:
    """[batch, heads, *last] of a named array, each of the first two as one dimension, of 1 if it has no axes."""
    axes = (*batch, *heads, *last)
    for axis in array.axes:
        if axis not in axes:
            raise ValueError(f"{NAME}: {axis} is an axis of a mask, a sink or a value, but not of the query; {ANOTHER}")
    for axis in axes:
        if axis not in array.axes:
            array = array.broadcast_axis(axis)
    sizes = [math.prod(x.size for x in group) for group in (batch, heads)]
    made: jax.Array = array.rearrange(axes).array.reshape(*sizes, *(x.size for x in last))
    return made


def _mask_of(mask: Any, batch: Sequence[Any], at: Any, of_keys: Any) -> Mask:
    """onchip's mask for Levanter's; raises for one that isn't made of ranges."""
    if mask is None:
        return Full()
    if not hasattr(mask, "is_causal"):
        raise NotImplementedError(f"{NAME}: the mask is an array; pass an AttentionMask of ranges, or {ANOTHER}")
    for name in [x.name for x in fields(mask) if x.name not in KNOWN]:
        if getattr(mask, name) is not None and getattr(mask, name) is not False:
            raise NotImplementedError(f"{NAME}: the mask has {name}, which onchip can't read as ranges; {ANOTHER}")
    made: Mask = Full()
    if mask.is_causal and mask.causal_offset is None:
        made = Causal()
    elif mask.is_causal:
        end = jnp.arange(1, at.size + 1)[None] + _rows(mask.causal_offset, batch, (), ())
        made = Intervals(0 * end, end)
    if mask.sliding_window is not None:
        made = made & Window(mask.sliding_window - 1)
    both_ways = getattr(mask, "bidirectional_window", None)  # Levanter has it since 2026
    if both_ways is not None:
        made = made & Window(both_ways, both_ways)
    if mask.segment_ids is not None:
        of_queries, keys_own = mask.segment_ids
        made = made & _segments(_by_row(of_queries, batch, at), _by_row(keys_own, batch, of_keys, at))
    return made


def _by_row(ids: Any, batch: Sequence[Any], *at: Any) -> jax.Array:
    """[B, T] from a named array whose axis of positions has the name of one in `at`, and the size of the first."""
    for other in at[1:]:
        if other.name in [x.name for x in ids.axes]:
            ids = ids.rename({other.name: at[0].name})
    return _rows(ids, batch, (), at[:1])[:, 0]


def _segments(of_queries: jax.Array, of_keys: jax.Array) -> Mask:
    """The mask by which each query sees the keys with its id; if these aren't one run, the last run."""
    documents = Documents(of_keys)
    if jax.default_backend() == "cpu":
        check_mask_values(documents)
    batch, tokens = of_keys.shape
    runs = documents.lower(batch, tokens, tokens, of_keys)

    def of_row(mine: jax.Array, ids: jax.Array, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(ids, stable=True)
        key = order[jnp.searchsorted(ids[order], mine, side="right") - 1]  # the last one with this id, if there is one
        there = ids[key] == mine
        return jnp.where(there, start[key], 0), jnp.where(there, end[key], 0)

    return Intervals(*jax.vmap(of_row)(of_queries, of_keys, runs.start, runs.end))


PARAMETERS = tuple(inspect.signature(named_attention).parameters)
_REPLACING = Replacing(
    "levanter",
    "pip install a newer marin-levanter",
    {"_try_te_attention": Ours("levanter.layers.attention", named_attention, PARAMETERS)},
)


def install_attention() -> Installed:
    """Compute Levanter's attention by `onchip.jax.attention` if `attn_backend` is "nvte".

    That is Levanter's default on GPUs; elsewhere set it in the model's config.  onchip's function takes the place of
    the one that calls Transformer Engine, which needn't be installed.  Causal masks with any offset, segments, both
    kinds of windows, `logits_soft_cap`, sinks and shared heads are supported; anything else raises, without a fallback.
    A second call does nothing.  Call it before the first step is compiled.

    Returns:
        What was replaced.

    Raises:
        ModuleNotFoundError: Levanter isn't installed.
        RuntimeError: Levanter's function isn't what onchip knows, or was replaced by something else.  Then nothing is
            replaced.

    Memory: that of `onchip.jax.attention`.

    Example, before Levanter's trainer starts::

        from onchip.integrations import levanter

        levanter.install_attention()

    Source: Levanter, `levanter/layers/attention.py`.
    """
    if importlib.util.find_spec("levanter") is None:
        raise ModuleNotFoundError(f"{NAME}: Levanter isn't installed; pip install marin-levanter", name="levanter")
    what = "Levanter's attention with attn_backend 'nvte', the default on GPUs,"
    return Installed("", _REPLACING.install("Levanter"), what=what)


def uninstall_attention() -> None:
    """Put Levanter's own function back.  Without an earlier `install_attention` it does nothing.

    Example:
        >>> from onchip.integrations.levanter import uninstall_attention
        >>> uninstall_attention()
    """
    _REPLACING.uninstall()
