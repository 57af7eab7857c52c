"""Prints how far attention's Mosaic kernels, interpreted, are from the plain path in float32, as one JSON line."""

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from onchip.attention.mosaic import op
from onchip.attention.mosaic.problem import memory_parts
from onchip.attention.problem import AttentionOptions, AttentionProblem
from onchip.attention.xla.plain import AttentionStatic, Parameters, Ranges
from onchip.jax import attention
from onchip.masks import Causal, Documents

INTERPRETER = InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")


def main(size, value_size, fused, tokens=150, heads=2, softcap=3.0):
    rng = np.random.default_rng(0)
    of = (heads, size), (1, size), (1, value_size), (heads, value_size)
    q, k, v, upstream = (jnp.asarray(rng.standard_normal((1, tokens, *x)), jnp.bfloat16) for x in of)
    sinks, of_lse = jnp.float32(rng.standard_normal(heads)), jnp.float32(rng.standard_normal((1, tokens, heads)))
    ids = jnp.asarray([[0] * 50 + [1] * 60 + [2] * 40])
    mask = Documents(ids, padding=2) & Causal()
    problem = AttentionProblem(1, tokens, tokens, heads, 1, size, value_size)
    room = None if fused else sum(memory_parts(problem, backward=True).values())
    static = AttentionStatic(problem, AttentionOptions(softcap=softcap, scratch_bytes=room), size**-0.5, 0)
    low = mask.lower(1, tokens, tokens, q)
    given = Parameters(q, k, v, sinks)
    run = jax.jit(partial(op.attend, static, interpret=INTERPRETER))
    outputs, saved = run(given, Ranges(low.start, low.end, None, None))
    back = jax.jit(partial(op.gradients, static, Parameters(True, True, True, True), interpret=INTERPRETER))
    made = back(saved, (upstream, of_lse))

    def plain(*given):
        return attention(*given[:3], mask, sinks=given[3], softcap=softcap, return_lse=True)

    right, pull = jax.vjp(plain, *(x.astype(jnp.float32) for x in given))
    pairs = zip((*outputs, *made), (*right, *pull((upstream.astype(jnp.float32), of_lse))), strict=True)
    errors = {}
    for name, (x, y) in zip(("out", "lse", "q", "k", "v", "sinks"), pairs, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        errors[name] = float(np.linalg.norm(x - y) / np.linalg.norm(y))
    print(json.dumps(errors))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
