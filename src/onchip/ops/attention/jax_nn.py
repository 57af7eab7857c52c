"""attention with the arguments of `jax.nn.dot_product_attention`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from onchip.attention.masks import Blocked, Causal, Full, Intervals, Mask, Window
from onchip.frontend.jax_inputs import is_array
from onchip.frontend.jax_types import Array
from onchip.frontend.options import require_bool
from onchip.ops.attention.jax_op import attention

OP = "dot_product_attention"


@overload
def dot_product_attention(
    query: Array,  # [B, T, N, H], or [T, N, H]
    key: Array,  # [B, S, K, H]
    value: Array,  # [B, S, K, H]
    bias: None = None,
    mask: Mask | Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,  # [B]
    key_value_seq_lengths: Array | None = None,  # [B]
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["auto", "mosaic_gpu", "xla"] | None = None,
    return_residual: Literal[False] = False,
    softcap: float | None = None,
    sinks: Array | None = None,  # [N]
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: Array,  # [B, T, N, H], or [T, N, H]
    key: Array,  # [B, S, K, H]
    value: Array,  # [B, S, K, H]
    bias: None = None,
    mask: Mask | Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,  # [B]
    key_value_seq_lengths: Array | None = None,  # [B]
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["auto", "mosaic_gpu", "xla"] | None = None,
    return_residual: Literal[True],
    softcap: float | None = None,
    sinks: Array | None = None,  # [N]
) -> tuple[jax.Array, jax.Array]: ...
def dot_product_attention(
    query: Array,  # [B, T, N, H], or [T, N, H]
    key: Array,  # [B, S, K, H]
    value: Array,  # [B, S, K, H]
    bias: None = None,
    mask: Mask | Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,  # [B]
    key_value_seq_lengths: Array | None = None,  # [B]
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["auto", "mosaic_gpu", "xla"] | None = None,
    return_residual: bool = False,
    softcap: float | None = None,
    sinks: Array | None = None,  # [N]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""`attention` with the arguments of `jax.nn.dot_product_attention`, as a replacement for it.

    `is_causal`, lengths and windows become ranges: they need no [T, S] array, and blocks of scores that are hidden are
    skipped.  If several masks are given, a query sees a key if all of them let it.

    Args:
        query: [B, T, N, H] or [T, N, H], float32, bfloat16, float16 or float64.
        key: [B, S, K, H] or [S, K, H], with N a multiple of K.
        value: as key.
        bias: None.  Scores have no bias here.
        mask: one of `onchip.masks`, or a bool array [T, S], [B, 1, T, S] or [1, 1, T, S]; T or S may be 1, as in
            [B, 1, 1, S] for keys that are padding.  An array isn't made of ranges, so it takes the backend "xla".
        scale: factor of the products, by default 1 / sqrt(H).
        is_causal: whether query i sees only the keys up to i.
        query_seq_lengths: [B] integers: queries from this one on see nothing, and their result is 0.
        key_value_seq_lengths: [B] integers: keys from this one on aren't seen.
        local_window_size: (left, right), or one number for both: query i sees the keys from i - left to i + right.
        implementation: the `backend` of `onchip.jax.attention`; None is "auto".
        return_residual: also return the log-sum-exp, [B, T, N] float32 (float64 for float64 inputs).
        softcap: as in `onchip.jax.attention`.
        sinks: [N], as in `onchip.jax.attention`.

    Returns:
        An array like query; with return_residual `(out, lse)`.  If a query sees nothing, its result is 0, whereas
        `jax.nn` returns the mean of all values.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape or option is wrong, there is a bias, or the mask differs between heads.

    Memory and sources: those of `onchip.jax.attention`.

    Example:
        >>> import jax
        >>> from onchip.jax import dot_product_attention
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 6, 2, 8)) for i in range(3))
        >>> ours = dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))
        >>> right = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))
        >>> bool(abs(ours - right).max() < 1e-6)
        True
    """
    if bias is not None:
        raise ValueError(f"{OP}: bias must be None, as scores have no bias here; use jax.nn.dot_product_attention")
    require_bool(OP, "is_causal", is_causal)
    require_bool(OP, "return_residual", return_residual)
    made = mask_of(OP, mask, [x.shape[-3] for x in (query, key) if is_array(x) and x.ndim > 2])
    if is_causal:
        made = made & Causal()
    if local_window_size is not None:
        made = made & _window(local_window_size)
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        made = made & _lengths(query, key, query_seq_lengths, key_value_seq_lengths)
    call: Callable[..., jax.Array | tuple[jax.Array, jax.Array]] = attention
    return call(
        query,
        key,
        value,
        made,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_residual,
        backend="auto" if implementation is None else implementation,
    )


def mask_of(op: str, mask: Any, sizes: Sequence[int]) -> Mask:
    """One of `onchip.masks`, from such a mask, None, or a bool array [B, 1, T, S] or its last three or two dimensions,
    the last two of which may be 1; `sizes` are T and S.

    Raises:
        TypeError, ValueError: any other mask.
    """
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return mask
    if not is_array(mask) or mask.dtype != bool:
        found = mask.dtype if is_array(mask) else type(mask).__name__
        raise TypeError(f"{op}: mask must be one of onchip.masks, or a bool array; got {found}")
    if mask.ndim not in (2, 3, 4) or (mask.ndim > 2 and mask.shape[-3] != 1):
        raise ValueError(f"{op}: mask must be [B, 1, T, S], the same for all heads; got shape {list(mask.shape)}")
    array = jnp.asarray(mask)
    if len(sizes) == 2:  # else attention refuses query or key
        if any(x not in (1, size) for x, size in zip(array.shape[-2:], sizes, strict=True)):
            raise ValueError(
                f"{op}: mask must be [B, 1, T, S], T={sizes[0]} and S={sizes[1]} or 1; got shape {list(mask.shape)}; "
                "for keys that are padding, [B, S], pass mask[:, None, None, :]"
            )
        array = jnp.broadcast_to(array, (*array.shape[:-2], *sizes))
    return Blocked(array.reshape(-1, *array.shape[-2:]), 1)


def _window(size: Any) -> Window:
    both = (size, size) if isinstance(size, int) else size
    if not (isinstance(both, tuple) and len(both) == 2 and all(isinstance(x, int) and x >= 0 for x in both)):
        raise ValueError(f"{OP}: local_window_size must be an int of 0 or more, or a pair of these; got {size!r}")
    return Window(*both)


def _lengths(query: Any, key: Any, of_queries: Any, of_keys: Any) -> Intervals:
    """Queries before `of_queries` see the keys before `of_keys`."""
    for name, x in (("query_seq_lengths", of_queries), ("key_value_seq_lengths", of_keys)):
        if x is not None and not (is_array(x) and jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 1):
            raise TypeError(f"{OP}: {name} must be an array [B] of integers; got {x!r}")
        batch = 1 if query.ndim == 3 else query.shape[0]
        if x is not None and x.shape != (batch,):
            raise ValueError(f"{OP}: {name} must be [{batch}], a number for each sequence; got shape {list(x.shape)}")
    tokens, keys = query.shape[-3], key.shape[-3]
    seen = jnp.full((1, tokens), keys) if of_keys is None else jnp.asarray(of_keys)[:, None]
    there = True if of_queries is None else jnp.arange(tokens)[None] < jnp.asarray(of_queries)[:, None]
    end = jnp.where(there, seen, 0).astype(jnp.int32) + jnp.zeros((1, tokens), jnp.int32)
    return Intervals(jnp.zeros_like(end), end)
