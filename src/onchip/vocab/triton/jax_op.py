"""The 'triton' backend: linear_cross_entropy for JAX on the Triton kernels of the PyTorch op, through jax-triton.

`forward` takes the softmax of the logits a tile at a time and keeps none of them.  `backward` makes them again, a chunk
of the vocabulary at a time, with their gradient in scratch: hidden's gradient is summed over the chunks in float32, and
each chunk's rows of the weight's gradient are written once.  What surrounds the kernels is in
`onchip.vocab.mosaic.positions`.
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import Needs, Static, Tensors
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic import positions as jax_positions
from onchip.vocab.mosaic.memory import VOCAB_TILE, MosaicPlan, groups, up
from onchip.vocab.mosaic.positions import (
    Head,
    Saved,
    alone,
    gradient_of_first,
    hidden_rows,
    is_there,
    logit_factor,
    make_head,
    merge,
    stored_tiles,
    target_logit,
    upstream,
)
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.xla.call import Outputs
from onchip.vocab.xla.tiles import Softmax

Array = jax.Array
KIB = 1024
# Shared memory of a block, by compute capability; less on all that aren't listed.
_SHARED = {"8.0": 163 * KIB, "8.7": 163 * KIB, "9.0": 227 * KIB, "10.0": 227 * KIB, "10.3": 227 * KIB}
_LEAST_SHARED = 99 * KIB


def refusal(static: Static, problem: Problem) -> str | None:
    """Why the kernels can't serve the call, or None."""
    if static.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {static.platform!r}"
    if problem.dtype == "float32":
        return "its products are of bfloat16 or float16; float32 operands would be rounded to tf32"
    if static.weight_layout != "vh":
        return f"it is written for weight_layout='vh', not for {static.weight_layout!r}"
    if static.strategy == "stash":
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


def forward(static: Static, config: MosaicPlan, tensors: Tensors, needs: Needs) -> tuple[Outputs, Any]:
    """The loss with its statistics, and what backward needs."""
    run = partial(_forward, static, config)
    return jax.custom_batching.sequential_vmap(run)(tensors)  # type: ignore[no-any-return]


def backward(
    static: Static, config: MosaicPlan, residuals: Any, grad_loss: Array, needs: Needs
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of hidden, weight and bias in their dtypes; what isn't needed is None."""
    run = partial(_backward, static, config, needs)
    return jax.custom_batching.sequential_vmap(run)(residuals, grad_loss)  # type: ignore[no-any-return]


def _calls() -> Any:
    """Triton need not be installed: only where it is used."""
    from onchip.vocab.triton import jax_calls as jax_triton_calls

    return jax_triton_calls


def _head(static: Static, tensors: Tensors) -> Head:
    heuristics = triton_spec.heuristic_tiles(_SHARED.get(_capability(), _LEAST_SHARED))
    return make_head(static, tensors, stored_tiles(static, tensors, heuristics))


def _launch(head: Head, tensors: Tensors, count: Array, shrink: Array | None = None) -> Any:
    numbers = (head.inner, tensors.label_smoothing, tensors.z_loss, shrink)
    return _calls().Launch(
        tiles=head.tiles,
        programs=getattr(jax.devices()[0], "core_count", 4),
        weight=head.weight,
        bias=head.bias,
        number=count.reshape(1),
        numbers=jnp.stack([jnp.zeros(()) if x is None else x.reshape(()) for x in numbers]).astype(jnp.float32),
        softcap=head.inner is not None,
        smoothing=tensors.label_smoothing is not None,
        z_loss=tensors.z_loss is not None,
        shrink=shrink is not None,
    )


def _forward(static: Static, config: MosaicPlan, tensors: Tensors) -> tuple[Outputs, Any]:
    head = _head(static, tensors)

    def take_softmax(rows: Array, label: Array, factor: Array, count: Array) -> tuple[Softmax, tuple[()]]:
        launch = _launch(head, tensors, count)
        partials = _calls().softmax_tiles(launch, rows, label, factor, stats=static.return_stats)
        there = jnp.arange(label.shape[0]) < count
        return merge(partials, target_logit(head, rows, label, factor), label, there, head.vocab), ()

    return jax_positions.forward(static, config, head, tensors, take_softmax)


def _backward(
    static: Static, config: MosaicPlan, needs: Needs, saved: Saved, grad_loss: Array
) -> tuple[Array | None, Array | None, Array | None]:
    calls = _calls()
    tensors, tokens = saved.tensors, saved.tokens
    head = _head(static, tensors)
    above = upstream(static, head, saved, grad_loss)
    launch = _launch(head, tensors, tokens.number, above.shrink)
    rows, factor, there = hidden_rows(tensors, tokens.source), logit_factor(head, tokens), is_there(tokens)
    padded = len(rows)

    def chunk(first: Any, size: int, state: dict[str, Array]) -> dict[str, Array]:
        """The gradients with those from `size` entries of the vocabulary, from tile `first` on."""
        state, tiles = dict(state), size // VOCAB_TILE
        at = jnp.stack([jnp.asarray(first, jnp.int32), jnp.asarray(tiles, jnp.int32)])
        vectors = (saved.label, factor, saved.lse, saved.log_prob, above.row)
        g = calls.gradient_tiles(launch, rows, *vectors, at, tiles)
        if needs.hidden:
            state["sums"] = calls.hidden_gradient(launch, g, state["sums"], at)
        if needs.weight:
            state["out"] = calls.weight_gradient(launch, g, rows, state["out"], at)
        if needs.bias:
            by_tile = jnp.where(there[:, None], g.reshape(tiles, padded, VOCAB_TILE), 0)
            sums = jnp.sum(by_tile, 1, dtype=jnp.float32).reshape(size)
            state["bias"] = lax.dynamic_update_slice(state["bias"], sums, at[:1] * VOCAB_TILE)
        return state

    state: dict[str, Array] = {}
    if needs.hidden:
        state["sums"] = jnp.zeros((padded, rows.shape[1]), jnp.float32)
    if needs.weight:
        state["out"] = lax.empty(head.weight.shape, head.weight.dtype)
    if needs.bias:
        state["bias"] = jnp.zeros(up(head.vocab, VOCAB_TILE), jnp.float32)
    for group in groups(head.vocab, config, again=True):
        first, step = group.first // VOCAB_TILE, group.size // VOCAB_TILE
        if group.times == 1:
            state = chunk(first, group.size, state)
        else:
            state = lax.fori_loop(0, group.times, partial(_step, chunk, first, step), state)
    shrink = 1.0 if above.shrink is None else above.shrink
    grad_hidden = grad_bias = None
    if needs.hidden:
        grad_hidden = gradient_of_first(head, saved, above, state["sums"], shrink)
    if needs.bias:
        assert tensors.bias is not None
        grad_bias = (state["bias"][: head.vocab] * shrink).astype(tensors.bias.dtype)
    gradients: tuple[Array | None, Array | None, Array | None] = alone((grad_hidden, state.get("out"), grad_bias))
    return gradients


def _step(chunk: Any, first: int, step: int, i: Array, state: dict[str, Array]) -> Any:
    return chunk(first + i * step, step * VOCAB_TILE, state)
