"""The 'mosaic_gpu' backend for logits that exist, on the CPU: its kernels interpreted and lowered for CUDA, and the ops
around them with stand-ins."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plain_rows
from linear_cross_entropy.small_mosaic import INTERPRETER
from onchip.jax import TopK, cross_entropy, log_probs
from onchip.ops.cross_entropy.checks import CHECKER as LOSSES
from onchip.ops.linear_log_probs.checks import CHECKER as LOG_PROBS
from onchip.vocab import jax_ways
from onchip.vocab.rows import memory, mosaic, mosaic_op
from onchip.vocab.rows.mosaic import RowGradient, RowWalk
from onchip.vocab.xla.tiles import Wanted
from shared import assert_refused, assert_within_bounds

ALL = Wanted(*[True] * len(Wanted._fields))


@pytest.fixture
def on_hopper(monkeypatch):
    plain_rows.stand_in(monkeypatch)
    yield monkeypatch
    plain_rows.forget()


def assert_near(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------------- the kernels


def rows(tokens, vocab, dtype, labels=None):
    """The kernels' arguments: logits, of which some are -inf, kept, factor, inner_scale, class_weight; ids and labels;
    what gradients are made of."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(tokens, vocab)) * 3, dtype).at[0, 3].set(-jnp.inf).at[1, :130].set(-jnp.inf)
    logits = logits.at[3, 70].set(21.0)
    kept = jnp.ones(tokens, jnp.int32).at[2].set(0)
    class_weight = jnp.asarray(rng.uniform(0, 2, vocab), jnp.float32).at[3].set(0)
    q = None if labels is None else jnp.asarray(rng.uniform(0, 1, (tokens, vocab)), labels).at[1, :130].set(0)
    numbers = [jnp.asarray(rng.normal(size=tokens), jnp.float32) for _ in RowGradient._fields]
    of = RowGradient(*numbers)._replace(center=jnp.full(tokens, 4.0), width=jnp.full(tokens, 2.0))
    ids = jnp.array([vocab - 1, 5, 0, -1][:tokens], jnp.int32)
    return (logits, kept, jnp.linspace(0.5, 1.5, tokens), jnp.array([0.3]), class_weight), ids, q, of


def assert_kernels_compute(vocab, dtype, labels=None, capped=True, plain=False, tiles=None, end=None):
    """What their stand-ins do, by which the ops below are compared with the oracle."""
    given, ids, q, of = rows(4, vocab, dtype, labels)
    if not capped:
        given = *given[:3], None, given[4]
    if plain:
        given = *given[:4], None
        of = RowGradient(of.factor, of.center, at_id=of.at_id)
    of = of if q is not None else of._replace(labels=None)
    if end is not None and not plain:
        given = *given[:4], given[4].at[end:].set(0)
    how, wanted = {"tiles": tiles, "interpret": INTERPRETER}, Wanted() if plain else ALL
    more = {"labels": q, "end": None if end is None else jnp.array([end])}
    made = jax.jit(partial(mosaic.statistics, wanted=wanted, **how))(*given, **more)
    right = plain_rows.statistics(*given, wanted=wanted, **more)
    assert made.keys() == right.keys()
    kept = np.asarray(given[1]) != 0
    led = kept & (np.asarray(right["total"]) < 1 / mosaic.LEADING)
    for name, x in made.items():
        # What is below the largest is asked for only where that leads.
        these = led if name.endswith("below") else kept
        x, y = np.asarray(x)[these], np.asarray(right[name])[these]
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=name)
    g = jax.jit(partial(mosaic.gradients, **how))(*given, ids, of, **more)
    assert g.dtype == jnp.dtype(dtype)
    eps = float(jnp.finfo(dtype).eps)
    assert_near(g.astype(jnp.float32), plain_rows.gradients(*given, ids, of, **more).astype(jnp.float32), 8 * eps)
    assert not g[2].any()


def test_kernels_interpreted():
    assert_kernels_compute(4104, "bfloat16", capped=False, plain=True, tiles=RowWalk(8, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "dtype", "labels", "how"),
    [
        (4104, "bfloat16", None, {"tiles": RowWalk(8, 2)}),  # tiles, and one that overlaps
        (2056, "bfloat16", None, {"tiles": RowWalk(8, 1, ahead=True), "capped": False}),
        (1027, "float16", None, {}),
        (131, "float32", None, {"capped": False}),
        (1024, "float32", "bfloat16", {}),
        (2056, "bfloat16", "float32", {"capped": False}),
        (515, "float16", "float16", {}),
        (1027, "float16", "float16", {"end": 1000}),  # a shard with padding
        (1032, "bfloat16", None, {"end": 0, "capped": False}),
    ],
    ids=str,
)
def test_more_kernels_interpreted(vocab, dtype, labels, how):
    assert_kernels_compute(vocab, dtype, labels, **how)


@pytest.mark.parametrize(
    ("vocab", "dtype", "labels"),
    [
        (128256, "bfloat16", None),
        pytest.param(50257, "float16", None, marks=pytest.mark.slow),
        pytest.param(131, "float32", "float16", marks=pytest.mark.slow),
        pytest.param(2056, "bfloat16", "float32", marks=pytest.mark.slow),
    ],
)
def test_kernels_lower(vocab, dtype, labels):
    given, ids, q, of = jax.eval_shape(lambda: rows(4, vocab, dtype, labels))
    of = of if q is not None else of._replace(labels=None)

    def run(given, ids, q, of, end):
        more = {"labels": q, "end": end}
        return mosaic.statistics(*given, wanted=ALL, **more), mosaic.gradients(*given, ids, of, **more)

    end = jax.ShapeDtypeStruct((1,), "int32") if labels == "float32" else None
    text = jax.jit(run).trace(given, ids, q, of, end).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("vocab", [128, 131, 1000, 2056, 50257, 50264, 128256, 151936, 262144])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_fit_a_row(vocab, dtype):
    """Rows begin at multiples of what a thread reads, and the last tile begins in the row."""
    for kernel, soft, entropy in itertools.product(("statistics", "gradients"), (False, True), (False, True)):
        t = RowWalk.of(kernel, vocab, dtype, soft=soft, entropy=entropy)
        assert vocab % t.unit == 0
        assert t.unit * jnp.dtype(dtype).itemsize <= 16
        assert mosaic.THREADS * t.unit * t.strips <= vocab


# ------------------------------------------------------------------------------------------------------------- the ops


def cases(checker):
    """Those whose rows are long enough."""
    found = [c for c in checker.cases if 128 <= c.vocab < 50000 and (checker is LOSSES or c.hidden == 0)]
    return [pytest.param(checker, c, id=f"{c}, {checker is LOSSES}", marks=[] if c.name in QUICK else pytest.mark.slow)
            for c in found]  # fmt: skip


QUICK = {"everything", "top-32, logits"}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("checker", "case"), [*cases(LOSSES), *cases(LOG_PROBS)])
def test_values(checker, case):
    for dtype in ("bfloat16",) if case.name in QUICK else ("float32", "float16"):
        assert_within_bounds(checker.check_case(case, dtype, "cpu", backend="mosaic_gpu"))


def labelled(form, tokens=6, vocab=136):
    """Logits and a loss of them with such labels, at all options."""
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.normal(size=(tokens, vocab)) * 2, jnp.float32)
    values = jnp.asarray(rng.uniform(0, 1, (tokens, vocab)), jnp.float32)
    ids = jnp.asarray(rng.integers(vocab, size=(tokens, 4)))
    target = {
        "ids": ids[:, 0].at[1].set(-100),
        "dense": values.at[:, 9].set(0) / vocab,
        "topk": TopK(ids, values[:, :4] / 4, "probs", "truncated"),
    }[form]
    weights = jnp.linspace(0, 2, vocab)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "class_weight": weights, "return_stats": True}
    return z.at[0, 9].set(-jnp.inf), partial(cross_entropy, target=target, reduction="none", **options)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("form", ["dense", pytest.param("topk", marks=pytest.mark.slow)])
def test_soft_labels(form):
    """As plain JAX, which is compared with the oracle elsewhere."""
    z, loss = labelled(form)
    z = z if form == "topk" else z.at[0, 9].set(-3.0)

    def run(backend):
        of = jax.value_and_grad(lambda z: (lambda x: (x[0].sum(), x))(loss(z, backend=backend)), has_aux=True)
        return of(z)

    assert_near(run("mosaic_gpu"), run("xla"), 2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
def test_transformations():
    """Under vmap a row is computed as without, and what an id that is none does stays in its row."""
    z, _ = labelled("ids", 12)
    z = z.reshape(2, 6, -1)
    ids = jnp.arange(12).reshape(2, 6).at[1, 2].set(136)

    def step(backend):
        def both(z, y):
            loss = partial(cross_entropy, reduction="none", backend=backend)
            of_ids = partial(log_probs, entropy=True, backend=backend)
            made, pullback = jax.vjp(lambda z: (loss(z, y), of_ids(z, y)[:2]), z)
            return made, pullback(jax.tree.map(jnp.ones_like, made))

        return both

    mapped = jax.jit(jax.vmap(step("mosaic_gpu")))(z, ids)
    assert_near(mapped, jax.vmap(step("xla"))(z, ids), 2e-5)
    alone = jax.jit(step("mosaic_gpu"))(z[1], ids[1])
    assert_near(jax.tree.map(lambda x: x[1], mapped), alone, 1e-6)
    scanned = jax.lax.scan(lambda total, z: (total + cross_entropy(z, ids[0], backend="mosaic_gpu"), None), 0.0, z)[0]
    assert_near(scanned, sum(cross_entropy(x, ids[0]) for x in z), 1e-5)


# ----------------------------------------------------------------------------------------------------- memory, refusals


def test_memory_is_vectors():
    """Without chunks, whatever the vocabulary."""
    for changes in ({}, {"stats": True, "softcap": True}, {"ids": 4, "op": "log_probs"}, {"labels": "float32"}):
        problem = memory.RowsProblem(4096, 128256, "bfloat16", "cuda", **changes)
        made = jax_ways.row_plan(problem, "mosaic_gpu", None)
        assert made.token_chunk == 4096
        needed = memory.scratch_bytes(replace(problem, mosaic=True), 4096)
        assert needed == 4 * (24 + 20 * problem.ids) * 4096
        assert jax_ways.row_plan(problem, "mosaic_gpu", needed) == made
        with pytest.raises(ValueError, match="T=4096, V=128256 in bfloat16: the kernels need"):
            jax_ways.row_plan(problem, "mosaic_gpu", needed - 1)


@pytest.mark.usefixtures("on_hopper")
def test_refusals():
    z, y = jnp.ones((2, 64)), jnp.zeros(2, jnp.int32)
    for op in (cross_entropy, log_probs):
        message = "backend 'mosaic_gpu' can't run this call: it needs rows of at least 128 logits; got V=64"
        assert_refused(op.__name__, lambda op=op: op(z, y, backend="mosaic_gpu"), ValueError, message)
        assert jax.tree.leaves(op(z, y))[0].size  # by 'xla'
    problem = memory.RowsProblem(2, 130)
    for changes, reason in (
        ({"dtype": "float64"}, "it takes no float64; pass backend='xla', or 'auto'"),
        ({"labels": "float64"}, "it takes no float64; pass backend='xla', or 'auto'"),
        ({}, None),
    ):
        assert mosaic_op.refusal(replace(problem, **changes), "gpu") == reason


def test_it_runs_on_hopper():
    assert "compute capability 9.0" in mosaic_op.refusal(memory.RowsProblem(2, 130), "gpu")
