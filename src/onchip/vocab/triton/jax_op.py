"""The 'triton' backend: linear_cross_entropy for JAX on the Triton kernels of the PyTorch op, through jax-triton.

`forward` takes the softmax of the logits a tile at a time and keeps none of them.  `backward` makes them again, a chunk
of the vocabulary at a time, with their gradient in scratch: hidden's gradient is summed over the chunks in float32, and
each chunk's rows of the weight's gradient are written once.  What surrounds the kernels is in
`onchip.vocab.mosaic.positions`.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic import positions
from onchip.vocab.mosaic.memory import VOCAB_TILE, MosaicPlan, groups, up
from onchip.vocab.mosaic.positions import (
    Positions,
    Upstream,
    after,
    bias_gradient,
    gradient_of_first,
    stored_tiles,
    unfused,
)
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.xla.loss import Call
from onchip.vocab.xla.tiles import Projection, TokenStats, Wanted

Array = jax.Array
SEQUENTIAL = True
KIB = 1024
# Shared memory of a block, by compute capability; less on all that aren't listed.
_SHARED = {"8.0": 163 * KIB, "8.7": 163 * KIB, "9.0": 227 * KIB, "10.0": 227 * KIB, "10.3": 227 * KIB}
_LEAST_SHARED = 99 * KIB

select = positions.select


def refusal(problem: Problem, platform: str, weight_layout: str, strategy: str) -> str | None:
    """Why the kernels can't serve the call, or None."""
    if problem.dtype == "float64":
        return "it takes no float64; pass backend='xla', or 'auto'"
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if problem.dtype == "float32":
        return "its products are of bfloat16 or float16; float32 operands would be rounded to tf32"
    if weight_layout != "vh":
        return f"it is written for weight_layout='vh', not for {weight_layout!r}"
    if strategy == "stash":
        return "it makes gradients by strategy 'recompute' only"
    for module, package in (("jax_triton", "jax-triton"), ("triton", "Triton")):
        if find_spec(module) is None:
            return f"{package} is not installed; pip install 'onchip[jax-triton]'"
    capability = _capability()
    major = capability.partition(".")[0]
    if not major.isdecimal() or int(major) < 8:
        return f"it needs compute capability 8.0 or later; this is {capability}"
    return None


def _capability() -> str:
    return str(getattr(jax.devices()[0], "compute_capability", "none"))


def plan(problem: Problem, strategy: str, budget: int | None) -> MosaicPlan:
    """The plan; raises ValueError where the budget is too small."""
    return replace(mosaic_spec.plan(problem, "recompute", budget), halves=False)


def _calls() -> Any:
    """Triton need not be installed: only where it is used."""
    from onchip.vocab.triton import jax_calls

    return jax_calls


def _launch(at: Positions) -> Any:
    heuristics = triton_spec.heuristic_tiles(_SHARED.get(_capability(), _LEAST_SHARED))
    programs = getattr(jax.devices()[0], "core_count", 4)
    return _calls().Launch(at, stored_tiles(at.call, heuristics), programs)


def forward(plan: MosaicPlan, wanted: Wanted, needs: Projection, call: Call) -> tuple[TokenStats, Any]:
    """The statistics of each position, and what backward needs."""
    at = Positions.of(call)
    launch, made, done = _launch(at), [], call.tokens.number
    for part in at.parts(plan):
        rows = at.rows(after(call.tokens.source[part], done))
        partials = _calls().softmax_tiles(launch, wanted, at.operands(rows, part))
        made.append(at.stats(partials, at.target_logit(rows, part), part))
        done = made[-1].lse
    stats = at.joined(made)
    return stats, None if plan.strategy == "forward" else (call, TokenStats(stats.lse, stats.log_prob))


def backward(plan: MosaicPlan, needs: Projection, saved: tuple[Call, TokenStats], grad_loss: Array) -> Projection:
    """The gradients of hidden, weight and bias in their dtypes; what isn't needed is None."""
    call, stats = saved
    calls, at = _calls(), Positions.of(call)
    launch, above, layer = _launch(at), Upstream.of(at, stats, grad_loss), at.layer
    rows = at.rows(call.tokens.source)
    padded = len(rows)

    def add(first: Any, size: int, state: dict[str, Array]) -> dict[str, Array]:
        """The gradients with those from `size` entries of the vocabulary, from tile `first` on."""
        state, chunk = dict(state), calls.Chunk(first, size // VOCAB_TILE)
        g = calls.gradient_tiles(launch, rows, stats, above, chunk)
        if needs.hidden:
            state["sums"] = calls.hidden_gradient(launch, g, state["sums"], chunk)
        if needs.weight:
            state["out"] = calls.weight_gradient(launch, g, rows, state["out"], chunk, above)
        if needs.bias:
            by_tile = jnp.where(at.there[:, None], g.reshape(chunk.tiles, padded, VOCAB_TILE), 0)
            sums = jnp.sum(by_tile, 1, dtype=jnp.float32).reshape(size)
            begin = jnp.asarray(first, jnp.int32) * VOCAB_TILE
            state["bias"] = lax.dynamic_update_slice_in_dim(state["bias"], sums, begin, 0)
        return state

    def add_group(group: Any) -> Callable[[Any, dict[str, Array]], dict[str, Array]]:
        first, tiles = group.first // VOCAB_TILE, group.size // VOCAB_TILE
        return lambda i, state: add(first + i * tiles, group.size, state)

    state: dict[str, Array] = {}
    if needs.hidden:
        state["sums"] = jnp.zeros((padded, rows.shape[1]), jnp.float32)
    if needs.weight:
        state["out"] = lax.empty(layer.weight.shape, layer.weight.dtype)
    if needs.bias:
        state["bias"] = jnp.zeros(up(layer.vocab, VOCAB_TILE), jnp.float32)
    for group in groups(layer.vocab, plan, recomputed=True):
        step = add_group(group)
        state = step(0, state) if group.times == 1 else lax.fori_loop(0, group.times, step, state)
    grad_hidden = gradient_of_first(at, above, state["sums"], targets=False) if needs.hidden else None
    grad_bias = bias_gradient(state["bias"], at, above) if needs.bias else None
    grad_hidden, grad_weight, grad_bias = unfused((grad_hidden, state.get("out"), grad_bias))
    return Projection(grad_hidden, grad_weight, grad_bias, layer.vocab_axis)
