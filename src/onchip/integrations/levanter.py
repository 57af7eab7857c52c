"""Levanter's fused cross-entropy through onchip: `register()` adds the implementation "onchip" to its table.

Levanter's functions then take `implementation="onchip"`, and with `register(default=True)` its models' losses use it.
`unregister()` removes it.
"""

import importlib
import sys
from typing import Any

from onchip.core.machine import naming_extra

with naming_extra("onchip.integrations.levanter", "jax"):
    import jax

import jax.numpy as jnp
import numpy.typing as npt

from onchip.frontend.jax_types import Array
from onchip.integrations.levanter_attention import install_attention as install_attention
from onchip.integrations.levanter_attention import uninstall_attention as uninstall_attention
from onchip.jax import linear_cross_entropy, linear_log_probs

NAME = "onchip"
API = "levanter.kernels.pallas.fused_cross_entropy_loss.api"
"""Levanter's module that holds the table."""

DTYPES = ("float32", "bfloat16", "float16")
NOTHING_IGNORED = -(2**63)
"""An `ignore_index` that no label of 32 bits has."""

_default: list[Any] = []  # Levanter's own `_default_implementations`, while onchip's is in its place


def register(*, default: bool = False) -> None:
    """Add the implementation "onchip" to Levanter's fused cross-entropy.

    Args:
        default: let Levanter use it where a caller names no implementation, as its models do.  It then replaces
            Levanter's whole list, so that a call that onchip can't compute fails.

    A further call never takes back the default.

    Raises:
        TypeError: default isn't True or False.
        ModuleNotFoundError: Levanter isn't installed.
        RuntimeError: this Levanter has no such table, or another implementation has this name.

    Source: Levanter, `levanter/kernels/pallas/fused_cross_entropy_loss/api.py`.
    """
    if not isinstance(default, bool):
        raise TypeError(f"onchip.integrations.levanter: default must be True or False; got {type(default).__name__}")
    api = _api()
    if api.IMPLEMENTATIONS.get(NAME, fused_cross_entropy) is not fused_cross_entropy:
        raise RuntimeError(
            f"onchip.integrations.levanter: Levanter has another implementation named {NAME!r}; remove that first"
        )
    api.IMPLEMENTATIONS[NAME] = fused_cross_entropy
    if default and not _default:
        _default.append(api._default_implementations)
        api._default_implementations = _only_onchip


def unregister() -> None:
    """Remove "onchip" from Levanter's table and from its default.  Without an earlier `register` it does nothing."""
    api: Any = sys.modules.get(API)
    if api is not None and api.IMPLEMENTATIONS.get(NAME) is fused_cross_entropy:
        del api.IMPLEMENTATIONS[NAME]
    if _default:
        api._default_implementations = _default.pop()


def fused_cross_entropy(
    x: Array,
    labels: Array,
    w: Array,
    *,
    block_sizes: object = None,
    dtype: npt.DTypeLike | None = jnp.float32,
    logit_soft_cap: float | None = None,
    precision: object = None,
    return_argmax: bool = False,
) -> tuple[jax.Array, ...]:
    """The function in Levanter's table: it returns (loss [B], lse [B]), with return_argmax (loss, lse, argmax [B]).

    Loss and lse have gradients.  Logits are float32 whatever `dtype` says, and float32 products have full precision.

    Args:
        x: [B, H] float32, bfloat16 or float16.
        labels: [B] integers in [0, V).  Any other raises where its value is known; under jit its loss is NaN.
        w: [H, V] of x's dtype, read in place.
        block_sizes: block sizes of Levanter's kernels; not used.
        dtype: of loss and lse: float32, bfloat16 or float16; None means float32.
        logit_soft_cap: above 0, or None.
        precision: precision of Levanter's products; not used, since onchip's are at least as precise.
        return_argmax: also return the int32 index of each token's largest logit (the first one, where logits tie).

    Raises:
        TypeError, ValueError: what `linear_cross_entropy` raises; also for another dtype.

    Memory: that of `linear_cross_entropy`; with return_argmax, and in backward if lse has a gradient, that of
    `linear_log_probs`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.integrations.levanter import fused_cross_entropy
        >>> x = jax.random.normal(jax.random.key(0), (8, 16))
        >>> w = jax.random.normal(jax.random.key(1), (16, 100))
        >>> loss, lse = fused_cross_entropy(x, jnp.arange(8), w)
        >>> loss.shape, lse.shape
        ((8,), (8,))

    Source: Levanter, `levanter/kernels/pallas/fused_cross_entropy_loss/reference.py`.
    """
    dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"onchip.integrations.levanter: dtype must be None or one of {', '.join(DTYPES)}; got {dtype}")
    if jnp.result_type(x) != jnp.result_type(w):
        raise TypeError(
            f"onchip.integrations.levanter: x is {jnp.result_type(x)} but w is {jnp.result_type(w)}; cast one of them"
        )
    if return_argmax:
        out = linear_log_probs(
            x, w, labels, weight_layout="hv", ignore_index=NOTHING_IGNORED, softcap=logit_soft_cap, lse=True, top1=True
        )
        return (-out.log_prob).astype(dtype), out.lse.astype(dtype), out.top1
    loss, stats = linear_cross_entropy(
        x,
        w,
        labels=labels,
        weight_layout="hv",
        ignore_index=NOTHING_IGNORED,
        softcap=logit_soft_cap,
        reduction="none",
        return_stats=True,
    )
    lse = _with_gradient(jnp.asarray(x), jnp.asarray(w), logit_soft_cap, jax.lax.stop_gradient(stats.lse))
    return loss.astype(dtype), lse.astype(dtype)


@jax.custom_vjp
def _with_gradient(x: jax.Array, w: jax.Array, softcap: Any, lse: jax.Array) -> jax.Array:
    """`lse` itself, as a function of x and w.  Its gradient costs nothing unless it is asked for."""
    return lse


def _forward(x: jax.Array, w: jax.Array, softcap: Any, lse: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
    return lse, (x, w, softcap)


def _backward(saved: tuple[Any, ...], upstream: jax.Array) -> tuple[jax.Array | None, ...]:
    x, w, softcap = saved
    ids = jnp.zeros(len(x), jnp.int32)
    _, pull = jax.vjp(lambda x, w: linear_log_probs(x, w, ids, weight_layout="hv", softcap=softcap, lse=True).lse, x, w)
    return *pull(upstream), None, None


_with_gradient.defvjp(_forward, _backward)


def _only_onchip() -> tuple[str, ...]:
    """The replacement of Levanter's `_default_implementations`."""
    return (NAME,)


def _api() -> Any:
    """Levanter's module; raise unless it is there and has the names that are used here."""
    try:
        api = importlib.import_module(API)
    except ModuleNotFoundError as error:
        if error.name == "levanter":
            raise ModuleNotFoundError(
                "onchip.integrations.levanter: Levanter isn't installed; pip install marin-levanter", name="levanter"
            ) from None
        if not (error.name or "").startswith("levanter."):
            raise
        raise RuntimeError(f"onchip.integrations.levanter: this Levanter has no {error.name}; {REMEDY}") from None
    for name in ("IMPLEMENTATIONS", "_default_implementations"):
        if not hasattr(api, name):
            raise RuntimeError(f"onchip.integrations.levanter: {API} has no {name}; {REMEDY}")
    return api


REMEDY = "pip install a newer marin-levanter (Levanter 1.1 of 2023 is too old)"
