"""The losses over a vocabulary in JAX, compared with the float64 oracle: cases, sizes, dtypes, layouts, chunks, shifts.

Compiling takes nearly all of the time, so cases that differ only in their numbers are left to `onchip check`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from onchip.jax import cross_entropy, linear_cross_entropy, linear_log_probs
from onchip.registry import OPS
from onchip.vocab.memory import Problem
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.xla import memory
from shared import assert_within_bounds
from shared_jax import assert_same, plain_logits, small_problem

STRATEGIES = ("stash", "recompute")
OF_JSD = [c for c in OPS["linear_jsd"].entry("checks:CHECK_CASES") if c.vocab < 10_000]
TOPK = [c for c in OF_JSD if c.teacher not in ("hidden", "logits") and c not in OF_JSD[::3]]
NAMES = {
    "linear_cross_entropy": (),
    "cross_entropy": (
        "large logits", "offset 1e4", "one class", "sum", "per token", "half ignored", "masked vocab", "temperature",
        "everything",
    ),
    "linear_log_probs": (
        "small logits", "peaked among several", "all ignored", "everything", "top-32", "peaked, logits",
    ),
    "linear_jsd": tuple(dict.fromkeys(c.name for c in [*OF_JSD[::6], *TOPK, OF_JSD[-1]])),
}  # fmt: skip
NARROW = [
    ("linear_cross_entropy", "peaked", "float16", {"strategy": "stash"}),
    ("linear_cross_entropy", "peaked", "bfloat16", {"strategy": "recompute"}),
    ("linear_cross_entropy", "everything", "bfloat16", {"strategy": "stash"}),
    ("linear_cross_entropy", "everything", "float16", {"strategy": "recompute"}),
    ("linear_cross_entropy", "token temperature", "bfloat16", {"strategy": "recompute"}),
    ("cross_entropy", "peaked", "float16", {}),
    ("cross_entropy", "everything", "bfloat16", {}),
    ("linear_log_probs", "everything", "bfloat16", {"entropy": True}),
    ("linear_log_probs", "everything, logits", "bfloat16", {"entropy": True}),
    ("linear_jsd", "everything", "bfloat16", {}),
    ("linear_jsd", "everything", "float16", {}),
]
TURNED = [
    ("linear_cross_entropy", "ragged", {"strategy": "stash"}),
    ("linear_cross_entropy", "everything", {"strategy": "recompute"}),
    ("linear_jsd", "everything", {}),
]
SIZES = [
    ("linear_cross_entropy", (1, 520, 2049), {"strategy": "stash"}),
    ("linear_cross_entropy", (4097, 31, 123), {"strategy": "recompute"}),
    ("linear_cross_entropy", (127, 520, 1), {"strategy": "stash"}),
    ("linear_cross_entropy", (127, 31, 50257), {"strategy": "stash"}),
    ("linear_cross_entropy", (4097, 31, 2049), {"strategy": "recompute"}),
    ("cross_entropy", (4097, 123), {}),
    ("cross_entropy", (1, 1), {}),
    ("cross_entropy", (2, 262144), {}),
    ("linear_log_probs", (4097, 31, 123), {}),
    ("linear_log_probs", (1, 31, 50257), {}),
]
CHUNKS = [
    ("linear_cross_entropy", "float16", {"strategy": "stash", "weight_layout": "vh"}),
    ("linear_cross_entropy", "float32", {"strategy": "recompute", "weight_layout": "hv"}),
    ("linear_log_probs", "float16", {"weight_layout": "hv"}),
    ("cross_entropy", "float32", {}),
    ("cross_entropy", "bfloat16", {}),
]
SLOW = (*NARROW[:5], *NARROW[7:9], NARROW[10], *SIZES[3:5], SIZES[8], CHUNKS[0], *CHUNKS[2:4])


def rows(given):
    """Some of these are slow."""
    return [pytest.param(*x, marks=[pytest.mark.slow] * (x in SLOW)) for x in given]


def case_of(op, name):
    return next(c for c in OPS[op].entry("checks:CHECK_CASES") if c.name == name)


def made_case(op, *sizes, **more):
    return type(OPS[op].entry("checks:CHECK_CASES")[0])("made", *sizes, **more)


def assert_right(op, case, dtype="float32", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    assert_within_bounds(OPS[op].entry("checks:CHECKER").check_case(case, dtype, **how))


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(case, STRATEGIES[i % 2], marks=[pytest.mark.slow] if i % 3 == 2 else [])
        for i, case in enumerate(OPS["linear_cross_entropy"].entry("checks:CHECK_CASES"))
        if case.vocab < 10_000
    ],
)
def test_cases_of_linear_cross_entropy(case, strategy):
    assert_right("linear_cross_entropy", case, strategy=strategy)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in NAMES.items() for name in names])
def test_cases(op, name):
    assert_right(op, case_of(op, name), **({"entropy": name != "top-32"} if op == "linear_log_probs" else {}))


@pytest.mark.parametrize(("op", "name", "dtype", "how"), rows(NARROW))
def test_cases_in_16_bits(op, name, dtype, how):
    assert_right(op, case_of(op, name), dtype, **how)


@pytest.mark.parametrize(("op", "name", "how"), TURNED)
def test_the_other_layout(op, name, how):
    assert_right(op, case_of(op, name), weight_layout="hv", **how)


@pytest.mark.parametrize(("op", "sizes", "how"), rows(SIZES), ids=str)
def test_sizes(op, sizes, how):
    assert_right(op, made_case(op, *sizes), **how)


@pytest.mark.parametrize(("op", "dtype", "how"), rows(CHUNKS), ids=str)
def test_many_chunks(op, dtype, how):
    """The smallest budget, or one for eight rows: several chunks of tokens and of the vocabulary, the last ragged."""
    options, strategy = {"softcap": 5.0}, how.get("strategy", "recompute")
    if op == "cross_entropy":
        problem = row_memory.RowsProblem(101, 700, dtype, softcap=True, stats=True, xla=True)
        budget = row_memory.scratch_bytes(problem, 8)
        assert row_memory.plan(problem, "", budget) == 8
        sizes, more = (101, 700), {"class_weight": dtype == "float32"}
    else:
        several = 3 * (op == "linear_log_probs")
        known = {"grad_bias": True, "softcap": True, "smoothing": not several, "stats": True, "compacted": True}
        problem = Problem(333, 40, 2500, dtype, ids=several, **known)
        budget = memory.scratch_at_least(problem, strategy)
        config = memory.plan(problem, strategy, budget)
        assert config.token_chunk < 333 / 2
        assert strategy == "stash" or config.vocab_chunk < 2500 / 2
        sizes, more = (333, 40, 2500), {"bias": True}
        more |= {"ids": 3, "ignored_ids": 0.2} if several else {"class_weight": strategy == "recompute"}
    options |= {} if op == "linear_log_probs" else {"label_smoothing": 0.1}
    assert_right(op, made_case(op, *sizes, ignored=0.2, options=options, **more), dtype, scratch_bytes=budget, **how)


@pytest.mark.parametrize(
    ("op", "several"),
    [
        (linear_cross_entropy, None),
        (cross_entropy, None),
        *(pytest.param(linear_log_probs, x, marks=pytest.mark.slow) for x in (1, 3)),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_position_predicts_the_next_label(op, several):
    """As with labels and weights that the caller has moved; the last position may hold anything."""
    h, w, y, b = small_problem(ids=several)
    h, y = h.at[:, -1].set(jnp.nan), y.astype(jnp.uint8)
    moved = jnp.concatenate([jnp.int32(y)[:, 1:], jnp.full_like(y[:, :1], -100, jnp.int32)], 1)
    weights = jnp.linspace(0, 1, 24).reshape(2, 12)

    def run(h, y, weights, **options):
        if several is not None:
            out = op(h, w, y, b, entropy=True, lse=True, top1=True, **options)
            return out.log_prob.sum() + out.entropy.sum() + out.lse.sum(), out.top1[:, -1] + 1
        x = (plain_logits(h, w, b), y) if op is cross_entropy else (h, w, y, b)
        of_class = {"class_weight": jnp.linspace(0, 2, len(w)), "token_weight": weights}
        each = op(*x, reduction="none", **of_class, **options)
        return op(*x, **of_class, **options), each[:, -1]

    step = jax.value_and_grad(run, has_aux=True)
    made = step(h, y, weights, shift=True)
    assert_same(made, step(h, moved, jnp.roll(weights, -1, 1)))
    assert not made[0][1].any()
    if op is not cross_entropy:
        assert not jnp.any(op(h[:, :0], w, y[:, :0], shift=True))
        assert not made[1][:, -1].any()


def test_the_largest_logit_counts_once():
    """XLA may compute a logit twice, by other instructions: here its division by the temperature."""
    rng = jax.random.key(0)
    x, y = jax.random.normal(rng, (64, 129)), jnp.arange(64)
    temperature = jnp.linspace(0.3, 3, 64)
    loss = cross_entropy(x, y, temperature=temperature, reduction="none")
    reference = OPS["cross_entropy"].entry("checks")
    assert_same(loss, reference.cross_entropy(x, y, temperature=temperature, reduction="none").loss)


def test_classes_that_weigh_nothing():
    h, w, y, _ = small_problem()
    x = plain_logits(h, w)
    loss, grad = jax.value_and_grad(partial(cross_entropy, class_weight=jnp.zeros(70)))(x, y)
    assert loss == 0
    assert not grad.any()
    x, y, weight = x.at[..., :40].set(-jnp.inf), jnp.maximum(y, 40), jnp.ones(70).at[:40].set(0)
    reference = OPS["cross_entropy"].entry("checks")
    oracle = reference.cross_entropy(x, y, class_weight=weight, label_smoothing=0.1)
    assert_same(cross_entropy(x, y, class_weight=weight, label_smoothing=0.1), oracle.loss)
