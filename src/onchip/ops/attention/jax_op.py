"""attention for JAX: the public function."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from onchip.attention.masks import MASKS, OP, STATIC, Causal, Mask, check_mask, check_mask_values
from onchip.attention.problem import MOSAIC_SIZES, AttentionOptions, Layout, check_shapes, scale_of
from onchip.attention.xla.plain import ATTENTION, AttentionStatic, Parameters, Ranges, roles_of
from onchip.core.backends import choose_backend
from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_inputs import check_kinds, dtype_of, hopper_refusal, is_array, platform, require_arrays
from onchip.frontend.jax_spread import by_tokens
from onchip.frontend.jax_types import Array
from onchip.frontend.jax_values import read
from onchip.frontend.options import ScratchBytes, scratch_in_bytes

Backend = Literal["auto", "mosaic_gpu", "xla"]
_CAUSAL = Causal()

for _mask in MASKS:
    _names = [x.name for x in fields(_mask)]
    jax.tree_util.register_dataclass(_mask, [x for x in _names if x not in STATIC], [x for x in _names if x in STATIC])


@overload
def attention(
    q: Array,  # [B, Tq, Hq, D]
    k: Array,  # [B, Tk, Hk, D]
    v: Array,  # [B, Tk, Hk, Dv]
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,  # [Hq]
    layout: Layout = "bthd",
    return_lse: Literal[False] = False,
    scratch_bytes: ScratchBytes = None,
    check_inputs: bool = False,
    backend: Backend = "auto",
) -> jax.Array: ...
@overload
def attention(
    q: Array,  # [B, Tq, Hq, D]
    k: Array,  # [B, Tk, Hk, D]
    v: Array,  # [B, Tk, Hk, Dv]
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,  # [Hq]
    layout: Layout = "bthd",
    return_lse: Literal[True],
    scratch_bytes: ScratchBytes = None,
    check_inputs: bool = False,
    backend: Backend = "auto",
) -> tuple[jax.Array, jax.Array]: ...
def attention(
    q: Array,  # [B, Tq, Hq, D]
    k: Array,  # [B, Tk, Hk, D]
    v: Array,  # [B, Tk, Hk, Dv]
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,  # [Hq]
    layout: Layout = "bthd",
    return_lse: bool = False,
    scratch_bytes: ScratchBytes = None,
    check_inputs: bool = False,
    backend: Backend = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Softmax attention under a mask that is data, without the [queries, keys] scores.

    For each query and head, over the keys j that the mask lets it see::

        s[j] = scale * q @ k[j],    z[j] = softcap * tanh(s[j] / softcap)     # without softcap s[j]
        lse  = log(exp(sink) + sum(exp(z)))                                   # without sinks log(sum(exp(z)))
        out  = sum(exp(z[j] - lse) * v[j])

    Without these options it is `jax.nn.dot_product_attention` with the mask as a matrix, in float32.

    Args:
        q: [B, Tq, Hq, D] float32, bfloat16, float16 or float64.  B may be absent in all three.
        k: [B, Tk, Hk, D] of q's dtype.  Head h of q goes with head h // (Hq / Hk) of k and v.
        v: [B, Tk, Hk, Dv] of q's dtype.
        mask: one of `onchip.masks`, or several combined by &, as in PyTorch.  A mask is a pytree: its arrays may be
            traced, and its integers are static.
        scale: factor of the products, by default 1 / sqrt(D).
        softcap: above 0, or None: squashes the scores smoothly into (-softcap, softcap).
        sinks: [Hq] of any float dtype: for each head a score that takes part in the softmax but has no value.  It is
            neither scaled nor capped.
        layout: "bthd", or "bhtd" if q is [B, Hq, Tq, D], and k, v and the results likewise.
        return_lse: also return each query's log-sum-exp, which is differentiable.
        scratch_bytes: bound on a device's memory above inputs, results and returned gradients: bytes, or a text like
            "1GiB" or "300 MiB".  That memory follows from the sizes, and a bound below it raises; a bound below what
            the fastest gradients take chooses others (see Memory).  With "xla" under plain `jit` the whole call's
            memory counts, since only the compiler knows how it is spread.
        check_inputs: check the mask's numbers on a GPU too, which waits for the device.  On the CPU they are always
            checked, unless they are traced; then check_inputs=True raises.
        backend: "mosaic_gpu" (NVIDIA GPUs of compute capability 9.0; bfloat16 and float16, D and Dv up to 256, any mask
            but `Blocked`), "xla" (plain JAX, any device), or "auto": the first of these that can run the call.

    Returns:
        [B, Tq, Hq, Dv] of q's dtype; with return_lse `(out, lse)`, with lse [B, Tq, Hq] in float32 (float64 for float64
        inputs).  A query that sees nothing has out 0, lse -inf (or its sink), and no gradient.  A number that isn't
        finite makes the results of the queries that see it NaN: with "xla" in all heads, and no other queries'; with
        "mosaic_gpu" only in its own heads, but perhaps also for queries that see a token of the same 128.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the call is differentiated in forward mode.
        ValueError: a shape or option is wrong; scratch_bytes is too small (the message says what suffices); the backend
            can't run the call; an id of `Documents` comes back after another one, where values are checked; or an
            array's type says that its tokens are sharded, outside `jax.shard_map`.
        NotImplementedError: the result is differentiated twice.

    Memory: q, k, v, out and 4 * B * Tq * Hq bytes are kept for backward.  "xla" also needs tiles of 128 queries by 256
    keys for all heads, and in backward the gradients in float32.  "mosaic_gpu" needs 8 * B * Tq * Hq bytes and a copy
    of out's gradient in backward, and copies of arrays where D and Dv aren't both 64, 128 or 256, or 192 and 128, or
    whose tokens aren't a multiple of 8.  With heads of up to 64 numbers one kernel makes all gradients, and sums q's in
    256 * B * Tq * Hq bytes, with a table of 4 * B * (Tk / 128) * (Tq / 64) bytes.  Not if scratch_bytes has no room for
    them, if the mask has a `stop` (as `Tree`), or if q, or both k and v, want no gradient.

    Example:
        >>> import jax
        >>> from onchip.jax import attention
        >>> from onchip.masks import Causal, Window
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 6, 2, 8)) for i in range(3))
        >>> jax.jit(attention)(q, k, v, Causal() & Window(left=3)).shape
        (1, 6, 2, 8)

    Sources: FlashAttention (arXiv:2205.14135); FlashMask (arXiv:2410.01359), for masks as ranges.
    """
    arrays = require_arrays(OP, {"q": q, "k": k, "v": v, "sinks": sinks}, optional=("sinks",))
    check_mask(mask, is_array)
    check_kinds(OP, arrays, integers=(), labels=("sinks",), dtypes=LOSS_DTYPE_BYTES.keys())
    for name in ("k", "v"):
        if dtype_of(arrays[name]) != dtype_of(q):
            raise TypeError(f"{OP}: q is {dtype_of(q)} but {name} is {dtype_of(arrays[name])}; cast one of them")
    options = AttentionOptions(scale, softcap, layout, scratch_in_bytes(OP, scratch_bytes, 0), check_inputs, return_lse)
    p = check_shapes(layout, {name: x.shape for name, x in arrays.items()})
    _check_shardings(layout, arrays)
    if check_inputs or jax.default_backend() == "cpu":
        check_mask_values(mask, lambda ids: _ids_to_check(ids, check_inputs))
    given = {name: jnp.asarray(x) for name, x in arrays.items()}
    whole = {name: x if name == "sinks" or x.ndim == 4 else x[None] for name, x in given.items()}
    lowered = mask.lower(p.batch, p.queries, p.keys, whole["q"])
    static = AttentionStatic(p, options, scale_of(options, p), lowered.tile)
    chosen = choose_backend(
        OP, backend, {"mosaic_gpu": mosaic_refusal(platform(), static, dtype_of(q).name), "xla": None}
    )
    turned = layout == "bhtd" and chosen == "xla"
    if turned:
        whole = {name: x if name == "sinks" else jnp.swapaxes(x, 1, 2) for name, x in whole.items()}
    ranges = [lowered.start, lowered.end, lowered.stop, lowered.blocks]
    rows: list[Any] = [None if x is None else jnp.broadcast_to(x, (p.batch, *x.shape[1:])) for x in ranges]
    parameters = Parameters(whole["q"], whole["k"], whole["v"], whole.get("sinks"))
    heads = 1 if layout == "bhtd" and not turned else 2
    roles, plain = roles_of(parameters, heads), chosen == "xla"
    out, lse = by_tokens(_engine(chosen), static, roles, parameters, Ranges(*rows), plain=plain)
    if turned:
        out, lse = jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)
    if q.ndim == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _ids_to_check(ids: Any, check_inputs: bool) -> Any:
    """The values of ids, or None."""
    if check_inputs and isinstance(ids, jax.core.Tracer):
        raise ValueError(
            f"{OP}: check_inputs=True reads Documents.ids, which have no values while they are traced; call it outside "
            "of jit, or leave out check_inputs: an id that comes back then begins another document"
        )
    return read(OP, "Documents.ids", ids, check_inputs)


def _check_shardings(layout: Layout, arrays: Mapping[str, Any]) -> None:
    """Raise for arrays whose types say that several devices share a sequence."""
    for name in ("q", "k", "v"):
        spec = jax.typeof(arrays[name]).sharding.spec
        over = spec[-3 if layout == "bthd" else -2]
        if over is not None:
            raise ValueError(
                f"{OP}: by its type {name} has its tokens sharded over {over!r}, but each device must have whole "
                f"sequences; pass jax.sharding.reshard({name}, ...), with sequences or heads split"
            )


def mosaic_refusal(platform: str, static: AttentionStatic, dtype: str) -> str | None:
    """Why the kernels can't serve a call, or None."""
    p, most = static.problem, MOSAIC_SIZES[-1][0]
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if dtype not in ("bfloat16", "float16"):
        return f"it is for bfloat16 and float16, not {dtype}"
    if max(p.size, p.value_size) > most:
        return f"heads have at most {most} numbers; q's have {p.size} and v's {p.value_size}"
    if static.tile:
        return "the mask has Blocked, which isn't made of ranges"
    if 0 in (p.batch, p.queries, p.keys):
        return "there are no queries or no keys"
    return hopper_refusal()


def _engine(backend: str) -> Any:
    """The backend's function, with gradients."""
    if backend == "mosaic_gpu":
        from onchip.attention.mosaic.op import ATTENTION as KERNELS  # Pallas takes a second to import

        return KERNELS
    return ATTENTION
