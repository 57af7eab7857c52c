"""JAX's 'triton' backend under Triton's interpreter, on the CPU: what test_interpreted.py starts in processes.

jax-triton's call is replaced by one that runs the kernels on the host.  Why in a process of their own, and in float16
only, is in interpreter.py; what nobody wrote is NaN here too.

    TRITON_INTERPRET=1 python interpreted_jax.py NAME ...     prints a line of JSON for each check
"""

import sys
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from common_jax import assert_right, small_problem

from interpreter import main
from onchip.jax import linear_cross_entropy
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, CLASS_CASES, Case
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.triton import jax_calls as jax_triton_calls
from onchip.vocab.triton import jax_op as jax_triton

NAMES = ("one class", "all ignored", "masked vocab", "everything", "all smoothed, classes")
CASES = [case for case in (*CHECK_CASES, *CLASS_CASES) if case.name in NAMES]
right = partial(assert_right, dtype="float16", backend="triton")
op = partial(linear_cross_entropy, backend="triton")


def triton_call(*arrays, kernel, out_shape, grid, num_warps, num_stages, input_output_aliases=None, **constants):
    """What jax_triton.triton_call is documented to do, by Triton's interpreter."""
    sources = {output: i for i, output in (input_output_aliases or {}).items()}

    def run(*given):
        inputs = [torch.from_numpy(np.array(x)) for x in given]
        outputs = [inputs[sources[i]] if i in sources else unwritten(x) for i, x in enumerate(out_shape)]
        kernel[grid](*inputs, *outputs, **constants, num_warps=num_warps, num_stages=num_stages)
        return [x.numpy() for x in outputs]

    return jax.pure_callback(run, out_shape, *arrays)


def unwritten(x):
    fill = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).max
    return torch.from_numpy(np.full(x.shape, fill, x.dtype))


def many_chunks():
    """The chunks of a loop, and another of what is left."""
    p = jax_triton.Problem(200, 40, 1100, "float16", device="cuda", grad_bias=True, stats=True, smoothing=True)
    least = mosaic_spec.scratch_bytes(p, mosaic_spec.MosaicPlan("recompute", 200, 0, 512))
    case = Case("chunks", 200, 40, 1100, bias=True, ignored=0.5, options={"label_smoothing": 0.1})
    with mock.patch.object(jax_triton, "plan", side_effect=jax_triton.plan) as planned:
        right(case, scratch_bytes=least)
    assert planned.called
    assert jax_triton.plan(p, "auto", least).chunk == 512


def forward_in_chunks_of_tokens():
    h, w, y, b = small_problem(tokens=600, vocab=300, dtype="float16")
    with mock.patch.object(jax_triton, "plan", return_value=mosaic_spec.MosaicPlan("forward", 128)):
        loss, stats = op(h, w, y, b, return_stats=True)
    expected, others = op(h, w, y, b, return_stats=True)
    for x, q in zip((loss, *stats), (expected, *others), strict=True):
        assert np.allclose(x, q, rtol=1e-6, atol=1e-6)


def a_bad_label():
    h, w, y, _ = small_problem(dtype="float16")
    bad = y.at[1, 7].set(70)
    loss, pullback = jax.vjp(lambda *x: op(*x, bad, reduction="none"), h, w)
    others = np.arange(24).reshape(2, 12) != 19
    grad_hidden, grad_weight = map(np.asarray, pullback(jnp.ones_like(loss)))
    assert np.isnan(loss[1, 7])
    assert np.isfinite(np.asarray(loss)[others]).all()
    assert np.isnan(grad_hidden[1, 7]).all()
    assert np.isfinite(grad_hidden[others]).all()
    assert np.isnan(grad_weight).all()


def mapped():
    h, w, y, _ = small_problem(dtype="float16")

    def step(h, y):
        return jax.value_and_grad(op, argnums=(0, 1))(h, w, y)

    loss, grads = jax.vmap(step)(h, y)
    for i in range(2):
        expected, others = step(h[i], y[i])
        assert np.array_equal(loss[i], expected)
        assert all(np.array_equal(g[i], q) for g, q in zip(grads, others, strict=True))


def only_what_is_wanted():
    h, w, y, b = small_problem(dtype="float16")
    every = jax.grad(op, argnums=(0, 1, 3))(h, w, y, b)
    for i, argument in enumerate((0, 1, 3)):
        assert np.array_equal(jax.grad(op, argnums=argument)(h, w, y, b), every[i])


CHECKS = {f"case-{case}": partial(right, case) for case in CASES} | {
    f.__name__: f for f in (many_chunks, forward_in_chunks_of_tokens, a_bad_label, mapped, only_what_is_wanted)
}


SLOW = ("case-all ignored", "case-masked vocab", "mapped", "only_what_is_wanted")
assert CHECKS.keys() >= set(SLOW)

if __name__ == "__main__":
    # Nothing else may wait for the device while a callback runs on it.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax_triton.refusal = lambda *_: None
    jax_triton_calls.triton_call = triton_call
    main(CHECKS, sys.argv[1:])
