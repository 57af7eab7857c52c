"""attention's Mosaic kernels on the CPU: what they are told about a mask; lowered for CUDA, and interpreted.

Lowering finds illegal operands and too much shared memory, the interpreter wrong results and races; neither notices a
missing commit_smem or wgmma_wait.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowered import on_h100
from onchip.attention.masks import Intervals
from onchip.attention.mosaic import work
from onchip.attention.problem import MOSAIC_SIZES
from onchip.jax import attention
from onchip.masks import Causal, Documents
from onchip.ops.attention.cases import KINDS, Drawn

BF16 = jnp.bfloat16
op = partial(attention, backend="mosaic_gpu")


@pytest.fixture
def hopper():
    with on_h100():
        yield


# -------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "blocked"])
def test_what_is_hidden_is_skipped_or_masked(kind):
    """Each tile is there once, the longest first; what it sees is in its blocks, and all see what isn't masked."""
    drawn = Drawn(2, 300, 300)
    lowered = KINDS[kind].make(jnp.asarray, drawn).lower(2, 300, 300, jnp.zeros(1))
    rows = [None if x is None else jnp.broadcast_to(x, (2, 300)) for x in (lowered.start, lowered.end, lowered.stop)]
    seen = np.broadcast_to(KINDS[kind].seen(drawn), (2, 300, 300))
    of_queries = [(partial(work.query_items, tile=tile), 128, tile, seen) for tile in (128, 192)]
    for make, block, tile_size, pairs in (*of_queries, (work.key_items, 64, 128, seen.swapaxes(1, 2))):
        items = np.asarray(make(Intervals(*rows), 300, block))
        assert sorted(map(tuple, items[:, :2])) == [(b, t) for b in range(2) for t in range(-(-300 // tile_size))]
        lengths = items[:, 3] - items[:, 2]
        assert (np.diff(lengths) <= 0).all()
        assert (lengths >= (0 if block == 64 else 1)).all()
        for batch, tile, first, last, full_first, full_last in items:
            of_tile = pairs[batch, tile * tile_size : (tile + 1) * tile_size]
            there = np.zeros(300, bool)
            there[first * block : last * block] = True
            assert not of_tile[:, ~there].any()
            assert of_tile[:, full_first:full_last].all()
            assert full_last <= 300 or block == 64  # keys that aren't there are masked


def test_heads_that_are_worked_on_together():
    assert work.heads_together(8, 1 << 20, 4 << 20) == 4
    assert work.heads_together(6, 1 << 20, 4 << 20) == 3
    assert work.heads_together(8, 1 << 20, 1 << 10) == 1


# ---------------------------------------------------------------------------------------------------- lowered for CUDA


def shapes(batch, queries, keys, heads, key_heads, size):
    return ((batch, queries, heads, size), BF16), *[((batch, keys, key_heads, size), BF16)] * 2


def lower(f, *given):
    arguments = [jax.ShapeDtypeStruct(*x) for x in given]
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def gradients(*, wanted=(0, 1, 2), mask=lambda ids: Documents(ids) & Causal(), **options):
    def loss(q, k, v, ids, *sinks):
        more = {"sinks": sinks[0]} if sinks else {}
        out, lse = op(q, k, v, mask(ids), return_lse=True, **options, **more)
        return out.astype(jnp.float32).sum() + lse.sum()

    return jax.value_and_grad(loss, wanted)


def test_vmap_is_a_larger_batch_and_unneeded_gradients_take_no_kernel(hopper):
    given = [((3, *x), dtype) for x, dtype in shapes(1, 256, 256, 2, 1, 64)]
    text = lower(jax.vmap(gradients(wanted=(0,)), in_axes=(0, 0, 0, None)), *given, ((256,), jnp.int32))
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "tensor<3x256x2x64xbf16>" in text


def test_which_calls_kernels_serve():
    q, k, v = (jnp.zeros((1, 8, h, 64), BF16) for h in (2, 1, 1))
    with on_h100():
        for wrong, call in {
            "it is for bfloat16 and float16, not float32": [x.astype(jnp.float32) for x in (q, k, v)],
            "heads have at most 256 numbers; q's have 264": [jnp.zeros((1, 8, 1, 264), BF16)] * 3,
            "there are no queries or no keys": [x[:, :0] for x in (q, k, v)],
        }.items():
            with pytest.raises(ValueError, match=f"backend 'mosaic_gpu' can't run this call: {wrong}"):
                op(*call)
    with pytest.raises(ValueError, match="it runs on NVIDIA GPUs, not on 'cpu'"):
        op(q, k, v)


# --------------------------------------------------------------------------------------------------------- interpreted


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MOSAIC_SIZES, ids=str)
def test_interpreted(sizes):
    """Forward and gradients of documents with softcap and sinks.  In a process of its own: warpgroups that wait take
    threads of XLA's pool, of which it makes as many as there are processors unless it is told otherwise."""
    script = Path(__file__).parent / "interpreted_attention.py"
    paths = os.pathsep.join(filter(None, sys.path))
    made = subprocess.run(
        [sys.executable, str(script), *map(str, sizes)],
        env={**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    errors = json.loads(made.splitlines()[-1])
    assert errors.keys() == {"out", "lse", "q", "k", "v", "sinks"}
    assert errors.pop("lse") < 1e-6
    assert errors.pop("sinks") < 1e-2  # two numbers, sums of terms that mostly cancel, made of out in 16 bits
    assert max(errors.values()) < 5e-3
