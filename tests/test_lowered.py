"""Calls of the 'mosaic_gpu' backend lowered for CUDA, without a GPU: they have so many kernels and copy nothing, and a
`jax.shard_map` changes no kernel.  Lowering finds illegal operands and too much shared memory.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import lowered
from lowered import BF16, F32, INT, attended, grouped, head, on_h100, quantised
from onchip.attention.masks import Intervals
from onchip.jax import (
    attention,
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
)
from onchip.masks import Causal, Documents, Window
from shard_map_lowering import kernels

RECORDED = json.loads((Path(__file__).parent / "manifests" / "jax.json").read_text())["cases"]
SHORT, LONG, F16 = (300, 192, 1088), {"heads": 6, "tokens": 333}, jnp.float16
SOFT = {
    "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "logit_scale": 0.5, "class_weight": True,
    "token_weight": True, "bias": True, "dtype": F16, "return_stats": True,
}  # fmt: skip
OF_IDS = {"op": linear_log_probs, "entropy": True}
DOCUMENTS = Documents(jnp.zeros((2, 333), INT)) & Causal()
TREE = Intervals(*(jnp.zeros((1, 333), INT) for _ in range(3)))


def each(names, slow):
    return pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in slow)) for x in names])


@pytest.fixture(autouse=True, scope="module")
def nothing_is_known():
    """Of kernels that other files' tests put in the place of these."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def check(lines, kernels):
    *found, program = lines
    assert len(found) == kernels
    assert " copy" not in program


RECORDED_ON_MOSAIC = [name for name in lowered.CASES if "mosaic_gpu" in name]


@each(RECORDED_ON_MOSAIC, slow=RECORDED_ON_MOSAIC)
def test_recorded_calls(name):
    """With as many kernels as tests/manifests has, whatever JAX's version."""
    check(lowered.CASES[name](), len(RECORDED[name]) - 1)


MORE = {
    # Softmax, logits again, both products.
    "three ids": (partial(head, *SHORT, **OF_IDS, ids=3), {"log_sum_sq_probs": True, "top1": True}, 4),
    "ids, hv": (partial(head, *SHORT, **OF_IDS, weight_layout="hv"), {"softcap": 5.0, "dtype": F16}, 4),
    "dense, hv": (partial(head, *SHORT, labels="dense", weight_layout="hv"), SOFT, 4),
    "dense, vh": (partial(head, *SHORT, labels="dense"), SOFT, 4),
    "topk, hv": (partial(head, *SHORT, labels="topk", weight_layout="hv"), SOFT, 4),
    "topk, vh": (partial(head, *SHORT, labels="topk"), SOFT, 4),
    # Three products, and two sums over rows, of a weight that isn't square.
    "groups, gkn": (partial(grouped, 500, way="both"), {"layout": "gkn", "activation": "swiglu", "bias": True}, 5),
    "groups, gnk": (partial(grouped, 500, way="both"), {"activation": "swiglu", "bias": True}, 5),
    "fp8": (partial(quantised, 8192, 6144, 4096), {"bias": True}, 3),
    "fp8, awkward": (partial(quantised, 130, 131, 521, weight_dtype=F32), {"bias": True, "weight_layout": "kn"}, 3),
    "fp8 of no rows": (partial(quantised, 0, 4, 3), {"bias": True, "weight_layout": "kn"}, 3),
    # Of sizes that are no multiples of tiles, nor of 8.
    "attention": (partial(attended, DOCUMENTS, **LONG), {"size": 128, "return_lse": True}, 3),
    "attention, capped": (partial(attended, DOCUMENTS, **LONG), {"softcap": 30.0, "layout": "bhtd", "sinks": True}, 3),
    "attention, heads of 40": (partial(attended, DOCUMENTS, **LONG), {"size": 40, "scale": -0.1, "sinks": True}, 3),
    "attention, stops": (partial(attended, TREE, **LONG), {"size": 128, "return_lse": True}, 3),
}  # fmt: skip


@each(MORE, slow=("ids, hv", "dense, hv", "dense, vh", "topk, hv", "groups, gnk", "fp8", "fp8 of no rows",
                  "attention, capped", "attention, heads of 40", "attention, stops"))  # fmt: skip
def test_more_calls(name):
    call, options, kernels = MORE[name]
    check(call(**options, backend="mosaic_gpu"), kernels)


def of(op, **options):
    return partial(op, backend="mosaic_gpu", **options)


def scaled(op, **options):
    return lambda z, scale, y: jax.tree.leaves(of(op, **options)(z * scale, y))[-1]


def divergence(h, w, v, x):
    return of(linear_jsd)(h, w, x, v)[None]


def masked(mask):
    return lambda q, k, v, ids: of(attention)(q, k, v, mask(ids))


LOGITS = ((40, 1024), BF16), ((), BF16), ((40,), INT)
HEADS = ((1, 256, 2, 64), BF16), ((1, 256, 1, 64), BF16), ((1, 256, 1, 64), BF16), ((1, 256), INT)


def of_head(tokens, hidden, vocab):
    return ((tokens, hidden), BF16), ((vocab, hidden), BF16), ((tokens,), INT)


def of_models(tokens):
    return ((tokens, 128), BF16), ((512, 128), BF16), ((512, 192), BF16), ((tokens, 192), BF16)


def of_groups(groups):
    return ((1024, 256), BF16), ((groups, 384, 256), BF16), ((groups,), INT)


SHARDED = {
    "linear_cross_entropy": (of(linear_cross_entropy, reduction="sum"), of_head(8192, 256, 4096), 5),
    "a model's linear_cross_entropy": (of(linear_cross_entropy, reduction="sum"), of_head(8192, 2048, 32000), 5),
    "cross_entropy": (scaled(cross_entropy, reduction="none", softcap=5.0), LOGITS, 2),
    "log_probs": (scaled(log_probs, entropy=True), LOGITS, 2),
    "linear_jsd": (divergence, of_models(128), 4),
    "linear_jsd in chunks": (divergence, of_models(1024), 4),
    # With lists of tiles and, for the weight's gradient and many groups, a counter.
    "grouped_matmul": (of(grouped_matmul), of_groups(4), 3),
    "grouped_matmul of many groups": (of(grouped_matmul), of_groups(40), 3),
    "fp8_linear": (of(fp8_linear), (((256, 256), BF16), ((384, 256), BF16), ((384,), BF16)), 3),
    "attention": (masked(lambda ids: Causal()), HEADS, 3),
}


@each(SHARDED, slow=("a model's linear_cross_entropy", "log_probs", "linear_jsd", "linear_jsd in chunks",
                     "grouped_matmul of many groups", "fp8_linear", "attention"))  # fmt: skip
def test_inside_of_shard_map_the_kernels_are_the_same(name):
    """Whether JAX tracks what varies over the mesh or not; each device has its own rows."""
    f, shapes, number = SHARDED[name]
    with on_h100():
        plain, tracked = (kernels(f, *shapes, check_vma=check) for check in (False, True))
        assert len(plain) >= number
        assert tracked == plain
        if name == "attention":  # whose kernels know no mask
            assert kernels(masked(lambda ids: Documents(ids) & Window(9)), *shapes, check_vma=False) == plain
