"""linear_log_probs on the 'mosaic_gpu' backend without a GPU: with plain stand-ins for its kernels, and lowered for
CUDA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import linear_log_probs
from onchip.ops.linear_log_probs.checks import CHECKER, LogProbsCase
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.memory import MosaicPlan
from shared import assert_within_bounds

# With 128 tokens kept in the gradient's memory, of 384 positions; the last tile of the vocabulary isn't full.
LONG = LogProbsCase("long", 500, 128, 2112, zipf=True, ignored=0.3)
KEPT = MosaicPlan("stash", 512, kept_in_gradient=128, chunk=256, kept_in_scratch=128)
ALL_IN_SCRATCH = MosaicPlan("stash", 512, chunk=2304, kept_in_scratch=512)
AGAIN = MosaicPlan("recompute", 512, chunk=512)


def assert_right(case, dtype="bfloat16", **how):
    assert_within_bounds(CHECKER.check_case(case, dtype, backend="mosaic_gpu", **how))


@pytest.mark.parametrize(
    ("plan", "dtype", "layout", "entropy", "changes"),
    [
        pytest.param(KEPT, "bfloat16", "vh", False, {}, marks=pytest.mark.slow),
        (KEPT, "bfloat16", "hv", True, {"logit_std": 3.0, "token_temperature": True}),
        (KEPT, "float16", "hv", False, {"options": {"softcap": 5.0}, "logit_std": 3.0}),
        pytest.param(ALL_IN_SCRATCH, "bfloat16", "vh", True, {"logit_std": 30.0}, marks=pytest.mark.slow),
        (AGAIN, "float16", "vh", True, {"options": {"softcap": 5.0}, "bias": True}),
        pytest.param(
            AGAIN,
            "bfloat16",
            "hv",
            True,
            {"ids": 3, "ignored_ids": 0.2, "token_temperature": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            AGAIN,
            "float16",
            "vh",
            False,
            {"ids": 3, "ignored_ids": 0.2, "target_prob": 0.999},
            marks=pytest.mark.slow,
        ),
        pytest.param(KEPT, "bfloat16", "vh", True, {"target_prob": 0.999}, marks=pytest.mark.slow),
        pytest.param(KEPT, "bfloat16", "vh", True, {"ignored": 1.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values(plan, dtype, layout, entropy, changes, on_the_cpu, monkeypatch):
    monkeypatch.setattr(mosaic_op, "plan", lambda p, *_: plan if p.any_grad else MosaicPlan("forward", 256))
    assert_right(replace(LONG, **changes), dtype, weight_layout=layout, entropy=entropy)


def test_of_its_own_plans(on_the_cpu):
    for entropy in (False, True):
        assert_right(replace(LONG, ids=int(entropy)), entropy=entropy)


def test_all_outputs_without_gradients(on_the_cpu):
    """Of several ids, in chunks of tokens; the same as plain JAX's."""
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in ((300, 128), (1088, 128)))
    ids = jnp.asarray(rng.integers(1088, size=(300, 3))).at[5].set(-100).at[7, 1].set(-100)
    asked = dict.fromkeys(("entropy", "lse", "top1", "mean_logits", "log_sum_sq_probs"), True)
    found, expected = (linear_log_probs(hidden, weight, ids, **asked, backend=x) for x in ("mosaic_gpu", "xla"))
    for name, x, y in zip(found._fields, found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5, err_msg=name)


def test_one_statistic_alone(on_the_cpu):
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in ((150, 128), (1088, 128)))
    ids = jnp.asarray(rng.integers(1088, size=150))
    whole = linear_log_probs(hidden, weight, ids, top1=True, entropy=True, backend="mosaic_gpu")
    alone = linear_log_probs(hidden, weight, ids, top1=True, backend="mosaic_gpu")
    np.testing.assert_array_equal(alone.top1, whole.top1)


def test_under_vmap_and_a_bad_id(on_the_cpu):
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in ((2, 130, 128), (1088, 128)))
    ids = jnp.asarray(rng.integers(1088, size=(2, 130))).at[1, 3].set(1088)

    def step(backend):
        def values(hidden, ids):
            return linear_log_probs(hidden, weight, ids, entropy=True, backend=backend)[:2]

        def both(hidden, ids):
            out, pullback = jax.vjp(lambda x: values(x, ids), hidden)
            return out, pullback(jax.tree.map(jnp.ones_like, out))[0]

        return jax.jit(jax.vmap(both))(hidden, ids)

    for x, y in zip(*(jax.tree.leaves(step(x)) for x in ("mosaic_gpu", "xla")), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert (np.isnan(x) == np.isnan(y)).all()
        x, y = np.nan_to_num(x), np.nan_to_num(y)
        assert np.linalg.norm(x - y) <= 6e-3 * np.linalg.norm(y)


def test_what_is_kept():
    """Exponentials of one id's tokens, but where an entropy's gradient can't be read off them; and none of several."""
    p = Problem(4096, 4096, 128256, "bfloat16", device="cuda", ids=1, per_token_loss=True)
    entropy = replace(p, stats=True)
    assert mosaic_memory.plan(p, "auto").kept == mosaic_memory.plan(entropy, "auto").kept == 4096
    for other in (replace(p, ids=2), replace(entropy, softcap=True), replace(entropy, dtype="float16")):
        assert mosaic_memory.plan(other, "auto").kept == 0
    frozen = replace(p, grad_weight=False)
    assert mosaic_memory.plan(frozen, "auto").by_tokens
    assert not mosaic_memory.plan(replace(frozen, stats=True), "auto", 4 << 30).by_tokens
    more = mosaic_memory.plan(replace(p, grad_hidden=False, grad_weight=False), "auto")
    taken = [mosaic_memory.scratch_bytes(replace(p, more_stats=n), more) for n in (0, 2)]
    assert taken[1] - taken[0] == 2 * 4 * 501 * more.token_chunk
