"""A mixture-of-experts layer for JAX on top of grouped_matmul, in plain functions: a reference to use or to copy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_inputs import accumulator, check_kinds, dtype_of, require_arrays, unsplit
from onchip.frontend.jax_types import Array
from onchip.frontend.options import require_bool, require_int, require_positive
from onchip.groups.routing import LEAST_TOTAL, MoEStats, Scoring, check_groups, check_routing, check_sizes, stats_of
from onchip.ops.grouped_matmul.jax_op import Backend, grouped_matmul

OP = "moe"
_BIASES = ("router_bias", "gate_up_bias", "down_bias")


class MoEParams(NamedTuple):
    """The weights of a layer with E experts from H to F and back, all [out, in] as in PyTorch.  A pytree."""

    router: Any
    """[E, H] float32."""
    gate_up: Any
    """[E, 2 F, H]: the first F of an expert's rows are the gate's."""
    down: Any
    """[E, H, F]"""
    shared_gate_up: Any = None
    """[2 S, H], for the expert that every token goes to, or None."""
    shared_down: Any = None
    """[H, S] or None."""
    router_bias: Any = None
    """[E] float32, or None."""
    gate_up_bias: Any = None
    """[E, 2 F], or None."""
    down_bias: Any = None
    """[E, H], or None."""


def init_moe(
    key: jax.Array,
    hidden: int,  # H
    intermediate: int,  # F
    num_experts: int,  # E
    shared_intermediate: int = 0,  # S
    dtype: DTypeLike = jnp.float32,  # of the experts
    *,
    bias: bool = False,
) -> MoEParams:
    """Random weights for `moe`, normal with standard deviation 1 / sqrt(inputs); with `bias`, also biases of zeros.

    Args:
        key: a random key of JAX.
        hidden, intermediate, num_experts: H, F and E.
        shared_intermediate: S, the inner size of an expert that every token goes to; 0 for none.
        dtype: dtype of the experts; the router is float32.
        bias: whether the router and the experts get biases.

    Returns:
        `MoEParams`.

    Raises:
        TypeError: a size is no int, or `bias` is no bool.
        ValueError: a size is below 1, or shared_intermediate below 0.

    Memory: 3 * (E * F + S) * H numbers of `dtype` and E * H in float32, and the biases; while a weight is made, copies
    of it in float32 too.

    Example:
        >>> import jax
        >>> from onchip.jax import init_moe
        >>> init_moe(jax.random.key(0), 16, 32, 4).gate_up.shape
        (4, 64, 16)
    """
    sizes = {"hidden": hidden, "intermediate": intermediate, "num_experts": num_experts}
    check_sizes("init_moe", sizes | {"shared_intermediate": shared_intermediate}, may_be_0=("shared_intermediate",))
    require_bool("init_moe", "bias", bias)
    keys = iter(jax.random.split(key, 5))

    def normal(*shape: int, dtype: DTypeLike = dtype) -> jax.Array:
        return jnp.asarray(jax.random.normal(next(keys), shape) * shape[-1] ** -0.5, dtype)

    router = normal(num_experts, hidden, dtype=jnp.float32)
    gate_up, down = normal(num_experts, 2 * intermediate, hidden), normal(num_experts, hidden, intermediate)
    params = MoEParams(router, gate_up, down)
    if shared_intermediate > 0:
        shared = normal(2 * shared_intermediate, hidden), normal(hidden, shared_intermediate)
        params = params._replace(shared_gate_up=shared[0], shared_down=shared[1])
    if bias:
        of_experts = (jnp.zeros(a.shape[:2], dtype) for a in (gate_up, down))
        biases = dict(zip(("gate_up_bias", "down_bias"), of_experts, strict=True))
        params = params._replace(router_bias=jnp.zeros(num_experts, jnp.float32), **biases)
    return params


def moe(
    params: MoEParams,
    x: Array,  # [..., H]
    *,
    top_k: int,
    norm_topk: bool = True,
    scoring: Scoring = "softmax",
    scaling_factor: float = 1.0,
    correction_bias: Array | None = None,  # [E]
    n_group: int = 1,
    topk_group: int = 1,
    backend: Backend = "auto",
) -> tuple[jax.Array, MoEStats[jax.Array]]:
    r"""A mixture-of-experts layer with SwiGLU experts, without a capacity: no token is dropped.

    For each token, with scores s = softmax(router @ x) in float32, or sigmoid(router @ x), and sums over the top_k
    experts e with the largest s::

        expert_e(x) = down[e] @ (silu(gate) * up)          # gate, up: halves of gate_up[e] @ x
        y = sum over e of w_e * expert_e(x) + shared(x)
        w_e = scaling_factor * s_e / (sum of s over these) # norm_topk=False: scaling_factor * s_e

    With a correction bias b the experts are those with the largest s + b; the weights come from s only.

    Args:
        params: from `init_moe`, or a model's.  The router's bias is added to its logits, the experts' biases to the
            products with gate_up and down.
        x: [..., H] float32, bfloat16, float16 or float64, of the experts' dtype; with float64 everything is float64.
        top_k: experts per token.
        norm_topk: True for weights that sum to 1; with softmax these are the softmax over the chosen experts' logits
            (Mixtral, Qwen3).  False for the scores among all experts (Switch, DeepSeek-V2).
        scoring: "softmax" over all experts, or "sigmoid" of each logit (DeepSeek-V3).
        scaling_factor: multiplies the weights (DeepSeek-V3: 2.5).
        correction_bias: [E] float32, a constant to autodiff: it is added to the scores when experts are chosen.
            `update_correction_bias` changes it so as to balance the experts, without a loss.
        n_group, topk_group: the experts form n_group groups of neighbours, and a token's experts come from its
            topk_group best groups, by the sum of a group's two largest scores (DeepSeek-V3: 8 and 4).
        backend: as in `grouped_matmul`.

    Returns:
        y [..., H] of x's dtype, and `MoEStats`.  Add a small part of its `aux_loss` to the loss (0.01 in Switch) to
        balance the experts, or of its `z_loss` (0.001 in ST-MoE).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes don't go together, or top_k isn't in [1, E].

    Memory: that of two calls of `grouped_matmul` with T * top_k rows, one with `rows` and one with `scatter_rows`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import init_moe, moe
        >>> params = init_moe(jax.random.key(0), 16, 32, num_experts=4)
        >>> y, stats = moe(params, jnp.ones((2, 5, 16)), top_k=2)
        >>> y.shape, int(stats.counts.sum())
        ((2, 5, 16), 20)

    Sources: the layer and its balancing loss as in Switch Transformers (arXiv:2101.03961), top-k as in Mixtral
    (arXiv:2401.04088), the shared expert as in DeepSeekMoE (arXiv:2401.06066), sigmoids and groups as in DeepSeek-V3
    (arXiv:2412.19437), the correction bias as in Loss-Free Balancing (arXiv:2408.15664), the z-loss as in ST-MoE
    (arXiv:2202.08906).
    """
    check_routing(OP, norm_topk, scoring, scaling_factor)
    _check(params, x, top_k)
    check_groups(OP, len(params.router), top_k, n_group, topk_group)
    if correction_bias is not None:
        _check_of_experts(OP, "correction_bias", correction_bias, len(params.router))
    num_experts = len(params.router)
    tokens = jnp.asarray(x).reshape(-1, x.shape[-1])
    total = accumulator(tokens.dtype)
    logits = jnp.matmul(tokens.astype(total), params.router.T.astype(total), precision="highest")
    if params.router_bias is not None:
        logits = logits + params.router_bias.astype(total)[None]
    scores = jax.nn.softmax(logits) if scoring == "softmax" else jax.nn.sigmoid(logits)
    probs = scores / (scores.sum(1, keepdims=True) + LEAST_TOTAL)
    # No gradient goes through the choice.
    choice = scores if correction_bias is None else scores + jnp.asarray(correction_bias, total)[None]
    expert = lax.top_k(_best_groups(lax.stop_gradient(choice), n_group, topk_group), top_k)[1]
    weight = jnp.take_along_axis(scores, expert, 1)
    if norm_topk:
        weight = weight / (weight.sum(1, keepdims=True) + LEAST_TOTAL)
    weight = unsplit(weight * scaling_factor, 0)

    # Row i of the products is the choice order[i] of all T * top_k, sorted by expert.
    expert = unsplit(expert, 0).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    token = (order // top_k).astype(jnp.int32)
    counts = jnp.bincount(expert, length=num_experts).astype(jnp.int32)
    inner = grouped_matmul(
        tokens,
        params.gate_up,
        counts,
        bias=params.gate_up_bias,
        activation="swiglu",
        rows=token,
        backend=backend,
    )
    y = grouped_matmul(
        inner,
        params.down,
        counts,
        bias=params.down_bias,
        row_scale=weight.reshape(-1)[order],
        scatter_rows=token,
        num_rows=len(tokens),
        backend=backend,
    )
    if params.shared_gate_up is not None:
        gate, up = jnp.split(tokens @ params.shared_gate_up.T, 2, axis=1)
        y = y + (jax.nn.silu(gate) * up) @ params.shared_down.T

    return y.reshape(x.shape), stats_of(counts, counts / max(len(expert), 1), probs, jax.nn.logsumexp(logits, 1))


def update_correction_bias(
    correction_bias: Array,  # [E]
    counts: Array,  # [E]
    rate: float = 0.001,
) -> jax.Array:
    """The correction bias for `moe` after a step: correction_bias + rate * sign(mean(counts) - counts).

    Experts with too many tokens then get fewer.

    Args:
        correction_bias: [E] float32 or float64, zeros at first.
        counts: [E] of any real dtype: the tokens that went to each expert in the step, from `MoEStats`, summed over
            micro-batches and devices.
        rate: how far a step goes, above 0 (DeepSeek-V3: 0.001).

    Returns:
        [E] of correction_bias' dtype.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes don't go together, or rate isn't above 0.

    Memory: a few arrays of E numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> from onchip.jax import update_correction_bias
        >>> update_correction_bias(jnp.zeros(4), jnp.array([2, 0, 1, 1]), rate=0.5).tolist()
        [-0.5, 0.5, 0.0, 0.0]

    Source: Loss-Free Balancing (arXiv:2408.15664).
    """
    op = "update_correction_bias"
    require_positive(op, "rate", rate)
    arrays = require_arrays(op, {"correction_bias": correction_bias, "counts": counts}, ())
    _check_of_experts(op, "correction_bias", correction_bias, arrays["correction_bias"].size)
    if counts.shape != correction_bias.shape:
        raise ValueError(
            f"{op}: counts has shape {list(counts.shape)} but correction_bias has {list(correction_bias.shape)}; both "
            "must be [E]"
        )
    if jnp.issubdtype(counts.dtype, jnp.complexfloating) or counts.dtype == bool:
        raise TypeError(f"{op}: counts must be real numbers; got {counts.dtype}")
    bias = jnp.asarray(correction_bias)
    load = jnp.asarray(counts).astype(bias.dtype)
    return bias + rate * jnp.sign(load.mean() - load)


def _best_groups(choice: jax.Array, n_group: int, topk_group: int) -> jax.Array:
    """The scores [T, E] of a token's topk_group best of n_group groups of neighbouring experts; -inf elsewhere."""
    if topk_group == n_group:
        return choice
    grouped = choice.reshape(-1, n_group, choice.shape[1] // n_group)
    best = lax.top_k(lax.top_k(grouped, 2)[0].sum(2), topk_group)[1]
    mine = (best[:, :, None] == jnp.arange(n_group)[None, None]).any(1)
    return jnp.where(mine[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def _check_of_experts(op: str, name: str, x: Any, experts: int) -> None:
    """Raise unless `x` is [E] float32 or float64: 16 bits would lose an update's small steps."""
    require_arrays(op, {name: x}, ())
    if dtype_of(x) not in (np.float32, np.float64):
        raise TypeError(f"{op}: {name} must be float32 or float64; got {x.dtype}")
    if x.shape != (experts,):
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}; it must be [E], [{experts}]")


def _check(params: Any, x: Any, top_k: Any) -> None:
    if not isinstance(params, MoEParams):
        raise TypeError(f"{OP}: params must be MoEParams, as init_moe returns; got {type(params).__name__}")
    optional = ("shared_gate_up", "shared_down", *_BIASES)
    arrays = require_arrays(OP, {"x": x, **params._asdict()}, optional)
    check_kinds(OP, arrays, integers=(), dtypes=LOSS_DTYPE_BYTES.keys())
    if (params.shared_gate_up is None) != (params.shared_down is None):
        raise TypeError(f"{OP}: params have only one of shared_gate_up and shared_down; pass both or neither")
    require_int(OP, "top_k", top_k)
    if params.router.ndim != 2 or params.down.ndim != 3:
        shapes = f"{list(params.router.shape)} and {list(params.down.shape)}"
        raise ValueError(f"{OP}: router must be [E, H] and down [E, H, F]; got shapes {shapes}")
    (experts, hidden), inner = params.router.shape, params.down.shape[2]
    if not 1 <= top_k <= experts:
        raise ValueError(f"{OP}: top_k must be in [1, E], E={experts}; got {top_k}")
    if x.ndim < 1 or x.shape[-1] != hidden:
        raise ValueError(f"{OP}: x has shape {list(x.shape)} but router has H={hidden}; x must be [..., H]")
    right: dict[str, tuple[int, ...]] = {"gate_up": (experts, 2 * inner, hidden), "down": (experts, hidden, inner)}
    if params.shared_down is not None:
        shared = params.shared_down.shape[-1]
        right |= {"shared_gate_up": (2 * shared, hidden), "shared_down": (hidden, shared)}
    of_biases = dict(zip(_BIASES, ((experts,), (experts, 2 * inner), (experts, hidden)), strict=True))
    right |= {name: shape for name, shape in of_biases.items() if name in arrays}
    for name, shape in right.items():
        a = arrays[name]
        if a.shape != shape:
            raise ValueError(f"{OP}: {name} has shape {list(a.shape)}; with these params it must be {list(shape)}")
        if name not in _BIASES and dtype_of(a) != dtype_of(x):
            raise TypeError(f"{OP}: x is {dtype_of(x)} but {name} is {dtype_of(a)}; cast one of them")
