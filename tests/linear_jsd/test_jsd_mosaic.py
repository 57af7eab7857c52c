"""The 'mosaic_gpu' backend of linear_jsd and jsd, on the CPU: its kernels interpreted and lowered for CUDA, and the
walks around them with stand-ins."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jsd_mosaic import assert_certain_models, forget, gradients, softmax, stand_in, terms

from linear_cross_entropy.small_mosaic import INTERPRETER, reference_to
from onchip.core.sizes import MIB
from onchip.frontend.topk import TopK
from onchip.jax import jsd, linear_jsd
from onchip.ops.linear_jsd import JsdOptions, jax_op, memory, mosaic_kernels, mosaic_walk
from onchip.ops.linear_jsd.checks import CHECK_CASES, CHECKER
from onchip.ops.linear_jsd.memory import Head, JsdMosaicPlan, JsdProblem
from onchip.ops.linear_jsd.mosaic_kernels import JsdHard, Tuning
from shared import assert_within_bounds

# With a vocabulary that the kernels take.
CASES = [replace(c, vocab=504) for c in CHECK_CASES if 1 < c.vocab < 10_000]
OF_LOGITS = [c for c in CASES if c.student == "logits"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def with_slow(cases, *quick):
    """All of the cases, of which only these are quick."""
    return [c if c.name in quick else slow(c) for c in cases]


@pytest.fixture
def on_hopper(monkeypatch):
    stand_in(monkeypatch)
    yield monkeypatch
    forget()


def assert_near(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------------- the kernels


@pytest.fixture
def small_blocks(monkeypatch):
    tuning = {key: Tuning(8, 16, int(key[0] != "terms")) for key in mosaic_kernels.TUNING}
    monkeypatch.setattr(mosaic_kernels, "TUNING", tuning)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("beta", "vocab", "dtypes", "hard", "end"),
    [
        slow(0.5, 2600, ("bfloat16", "float32"), False, None),  # blocks of 2048, strips of 1024, one overlaps
        (0.3, 136, ("float32", "float32"), True, None),
        slow(0.0, 1024, ("float16", "bfloat16"), False, None),
        slow(1.0, 1024, ("bfloat16", "bfloat16"), True, None),
        slow(0.5, 2600, ("bfloat16", "float32"), True, 1500),  # a shard with padding, and a block of nothing else
    ],
)
def test_kernels_interpreted(beta, vocab, dtypes, hard, end):
    """They compute what their stand-ins do, which the walks below are compared with the oracle by."""
    rng = np.random.default_rng(0)
    z, u = (jnp.asarray(rng.normal(size=(5, vocab)) * 3, dtype) for dtype in dtypes)
    z, u = z.at[0, 3].set(-jnp.inf).at[1, :7].set(-jnp.inf), u.at[0, 3:5].set(-jnp.inf)
    token = jnp.array([0, 1, -1, 3, 4], jnp.int32)
    label = jnp.array([vocab - 1, 9, 0, 2, 5], jnp.int32) if hard else None
    options = JsdOptions(beta=beta, temperature=1.5, hard_weight=0.2 * hard)
    row = jnp.linspace(0.5, 1.5, 5)
    means = beta != 0, beta != 1
    end = None if end is None else jnp.array([end])

    def run(softmax, terms, gradients, **how):
        how["end"] = end
        both = softmax(z, token, label, 1.5, **how), softmax(u, token, None, 1.5, **how)
        found = terms(z, u, token, both, options, means=means, **how)
        of_hard = JsdHard(label, row, row, -row) if hard else None
        arguments = z, u, token, both, found[1:], (row, 2 * row), of_hard, options
        made = gradients(*arguments, dtypes=(jnp.float32, jnp.bfloat16), **how)
        refs = reference_to(jnp.ones((9, vocab), jnp.bfloat16))
        gradients(*arguments, (None, refs), jnp.array([3], jnp.int32), (jnp.float32, None), **how)
        counted = [jnp.where(token < 0, 0, x) for x in jax.tree.leaves((both, found))]
        return counted, made, jax.freeze(refs)

    of = mosaic_kernels
    made = jax.jit(partial(run, of.softmax, of.terms, of.gradients, interpret=INTERPRETER))()
    right = jax.jit(partial(run, softmax, terms, gradients))()
    assert_near(made[0], right[0], 2e-6)
    assert_near(made[1:], right[1:], 2**-7)
    np.testing.assert_allclose(made[1][0], right[1][0], rtol=1e-5, atol=1e-6)
    assert not made[1][0][2].any()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("vocab", "dtype", "end"), [(136, "float32", None), slow(2600, "bfloat16", None), slow(2600, "float32", 2000)]
)
def test_kernels_of_a_topk_teacher_interpreted(vocab, dtype, end):
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.normal(size=(5, vocab)) * 3, dtype).at[0, 3].set(-jnp.inf)
    token, label = jnp.array([0, 1, -1, 3, 4], jnp.int32), jnp.array([vocab - 1, 9, 0, 2, -1], jnp.int32)
    ids = np.sort(np.argsort(rng.random((5, vocab)), 1)[:, :6], 1)
    # Neighbours, in the first and the last strip; those that another device has; none here at all.
    ids[0], ids[1], ids[3] = [0, 1, 2, 3, vocab - 2, vocab - 1], [-1, -1, -1, 8, 130, 131], -1
    ids, end, row = jnp.asarray(ids, jnp.int32), None if end is None else jnp.array([end]), jnp.linspace(0.5, 1.5, 5)
    hard, options = JsdHard(label, row, row, -row), JsdOptions(temperature=1.5, hard_weight=0.2)

    def run(softmax, gradients, **how):
        found = softmax(z, token, label, 1.5, end=end, ids=ids, **how)
        arguments = z, None, token, (found,), (None, None), (row, None), hard, options
        made, _ = gradients(*arguments, dtypes=(jnp.float32, None), end=end, **how)
        return [jnp.where(token < 0, 0, x) for x in jax.tree.leaves(found)], made

    made = jax.jit(partial(run, mosaic_kernels.softmax, mosaic_kernels.gradients, interpret=INTERPRETER))()
    right = jax.jit(partial(run, softmax, gradients))()
    assert_near(made[0], right[0], 2e-6)
    np.testing.assert_allclose(made[1], right[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("vocab", "dtypes"),
    [(128, ("bfloat16", "bfloat16")), (520, ("float32", "float16")), (128256, ("float32", "float32"))],
)
def test_kernels_lower(vocab, dtypes):
    options = JsdOptions(beta=0.3, hard_weight=0.2)
    z, u = (jax.ShapeDtypeStruct((300, vocab), dtype) for dtype in dtypes)
    integer, number = (jax.ShapeDtypeStruct((300,), dtype) for dtype in ("int32", "float32"))

    def run(z, u, token, x):
        of, how = mosaic_kernels, {"end": jnp.array([vocab // 2])} if vocab == 520 else {}
        both = of.softmax(z, token, token, 1.0, **how), of.softmax(u, token, None, 1.0, **how)
        found = of.terms(z, u, token, both, options, **how)
        hard = JsdHard(token, x, x, x)
        made = of.gradients(z, u, token, both, found[1:], (x, x), hard, options, dtypes=dtypes, **how)
        others = of.softmax(z, token, token, 1.0, ids=jnp.stack([token, token + 1], 1), **how)
        more = of.gradients(z, None, token, (others,), (None, None), (x, None), hard, options, dtypes=dtypes, **how)
        return made, more[0]

    text = jax.jit(run).trace(z, u, integer, number).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 6


# ----------------------------------------------------------------------------------------------------------- the walks


@pytest.mark.parametrize("case", with_slow(CASES, "everything", "masked vocab"), ids=str)
@pytest.mark.usefixtures("on_hopper")
def test_walks(case):
    assert_within_bounds(CHECKER.check_case(case, "bfloat16", "cpu", backend="mosaic_gpu"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", with_slow(OF_LOGITS, "logits, beta 0.3"), ids=str)
@pytest.mark.usefixtures("on_hopper")
def test_walks_of_logits(case, dtype):
    assert_within_bounds(CHECKER.check_case(case, dtype, "cpu", backend="mosaic_gpu"))


def heads(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = (2, 50, 16), (520, 16), (2, 50, 24), (520, 24)
    return [jnp.asarray(rng.standard_normal(s) * (1 if len(s) == 3 else 0.5), dtype) for s in shapes]


WAYS = [JsdMosaicPlan("kept", 16), JsdMosaicPlan("summed", 16), JsdMosaicPlan("again", 16, 128)]


@pytest.mark.parametrize("needs", [(0, 1, 4), *map(slow, ((0,), (1, 2, 3, 5)))], ids=str)
@pytest.mark.parametrize(("way", "reduction", "layout"), [
    (WAYS[0], "mean", "vh"),
    (WAYS[1], "mean", "vh"),
    (WAYS[2], "none", "vh"),
    slow(WAYS[0], "none", "hv"),
    slow(WAYS[2], "mean", "hv"),
], ids=str)  # fmt: skip
def test_ways(way, reduction, layout, needs, on_hopper):
    """Whichever way, and in chunks, gradients are those of plain JAX."""
    arrays, y = heads(), jnp.arange(100).reshape(2, 50).at[0, :30].set(-100)
    biases = [jnp.asarray(np.random.default_rng(1).standard_normal(520), jnp.bfloat16) for _ in range(2)]
    g = jnp.linspace(0.5, 1.5, 100).reshape(2, 50)
    if layout == "hv":
        arrays[1::2] = [x.T for x in arrays[1::2]]

    def run(backend, argnums):
        f = partial(linear_jsd, labels=y, beta=0.3, hard_weight=0.2, reduction=reduction, teacher_grad=True,
                    weight_layout=layout, backend=backend)  # fmt: skip

        def loss(*a):
            made = f(*a[:4], student_bias=a[4], teacher_bias=a[5])
            return (made * (g if reduction == "none" else 3)).sum()

        return jax.value_and_grad(loss, argnums)(*arrays, *biases)

    on_hopper.setattr(mosaic_walk, "plan", lambda *_: way)
    forget()
    assert_near(run("mosaic_gpu", needs), run("xla", needs), 2**-6)


@pytest.mark.parametrize("way", [*map(slow, WAYS[:2]), WAYS[2]], ids=str)
def test_ways_beside_logits(way, on_hopper):
    """With a teacher's logits that exist."""
    h, w, *_ = heads()
    u = jnp.asarray(np.random.default_rng(2).standard_normal((2, 50, 520)), jnp.bfloat16)
    on_hopper.setattr(mosaic_walk, "plan", lambda *_: way)
    forget()
    step = [jax.grad(partial(linear_jsd, teacher_logits=u, backend=x), (0, 1)) for x in ("mosaic_gpu", "xla")]
    assert_near(*(f(h, w) for f in step), 2**-6)


def of_topk(rest, tokens=(2, 50), vocab=520, count=8):
    """A top-k teacher with an id that leads, one out of range, and an ignored token."""
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.random((*tokens, vocab)), -1)[..., :count].astype(np.int32)
    values = np.log(rng.random(ids.shape) / count)
    values[0, 1, 0] = -1e-3
    values[0, 1, 1:] = -12.0
    return TopK(jnp.asarray(ids), jnp.asarray(values, jnp.float32), "log_probs", rest)


@pytest.mark.parametrize(("way", "rest", "beta"), [
    (WAYS[0], "tail", 0.3),
    (WAYS[1], "truncated", 0.0),
    (WAYS[2], "renormalised", 1.0),
    slow(WAYS[0], "truncated", 1.0),
    slow(WAYS[1], "tail", 0.0),
    slow(WAYS[2], "tail", 0.3),
], ids=str)  # fmt: skip
def test_ways_with_a_topk_teacher(way, rest, beta, on_hopper):
    h, w, *_ = heads()
    y = jnp.arange(100).reshape(2, 50).at[0, 3:30].set(-100)
    topk = of_topk(rest)
    y = y.at[1].set(topk.indices[1, :, 0])  # labels among the ids, too
    on_hopper.setattr(mosaic_walk, "plan", lambda *_: way)
    forget()

    def run(backend):
        f = partial(linear_jsd, teacher_topk=topk, labels=y, hard_weight=0.2, temperature=1.5, beta=beta)
        return jax.value_and_grad(partial(f, backend=backend), (0, 1))(h, w)

    assert_near(run("mosaic_gpu"), run("xla"), 2**-6)


@pytest.mark.parametrize("rest", ["tail", *map(slow, ("truncated", "renormalised"))])
@pytest.mark.parametrize("hard", [slow(0.0), 0.3])
@pytest.mark.usefixtures("on_hopper")
def test_logits_with_a_topk_teacher(rest, hard):
    z = jnp.asarray(np.random.default_rng(4).standard_normal((2, 50, 520)) * 3, jnp.float32)
    topk = of_topk(rest)
    z = z.at[0, 1, topk.indices[0, 1, 0]].set(25.0).at[0, 2, :7].set(-jnp.inf)
    y = jnp.arange(100).reshape(2, 50).at[0, 3:30].set(-100)
    topk = topk._replace(indices=topk.indices.at[0, 0, 3].set(-7))

    def run(backend):
        f = partial(jsd, teacher_topk=topk, temperature=1.5, beta=0.3, hard_weight=hard, reduction="none", labels=y)
        made, pullback = jax.vjp(jax.jit(partial(f, backend=backend)), z)
        return made, *pullback(jnp.linspace(0.5, 2, 100).reshape(2, 50))

    made, right = run("mosaic_gpu"), run("xla")
    assert np.isnan(made[0][0, 0])
    assert np.isnan(right[0][0, 0])
    assert_near(made[0].at[0, 0].set(0), right[0].at[0, 0].set(0), 1e-6)
    assert_near(made[1].at[0, 0].set(0), right[1].at[0, 0].set(0), 1e-6)


def test_no_array_of_all_logits(on_hopper):
    h, w, x, v = heads()

    def text(way):
        on_hopper.setattr(mosaic_walk, "plan", lambda *_: way)
        forget()
        return str(jax.make_jaxpr(jax.grad(partial(linear_jsd, backend="mosaic_gpu"), (0, 1)))(h, w, x, v))

    assert "[112,520]" in text(WAYS[0])
    assert all("[112,520]" not in text(way) for way in WAYS[1:])


@pytest.mark.usefixtures("on_hopper")
def test_certain_models():
    assert_certain_models("mosaic_gpu")


@pytest.mark.usefixtures("on_hopper")
def test_transformations():
    arrays = heads()
    call = partial(linear_jsd, backend="mosaic_gpu")
    each = jax.vmap(lambda h, w, x, v: jax.grad(call, (0, 1))(h, w, x, v), (0, None, 0, None))(*arrays)
    for i in range(2):
        one = jax.grad(call, (0, 1))(arrays[0][i], arrays[1], arrays[2][i], arrays[3])
        assert_near([x[i] for x in each], one, 2**-7)
    z, u = jnp.ones((2, 3, 128)), jnp.linspace(0, 1, 768).reshape(2, 3, 128)
    assert jax.vmap(partial(jsd, backend="mosaic_gpu"))(z, u).shape == (2,)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("beta", [*map(slow, (0.0, 1.0)), 0.3])
def test_equal_models_cost_exactly_nothing(beta):
    h, w, _, _ = heads()
    op = partial(linear_jsd, beta=beta, temperature=0.7, teacher_grad=True, backend="mosaic_gpu")
    assert all(not x.any() for x in jax.tree.leaves(jax.value_and_grad(op, (0, 1, 2, 3))(h, w, h, w)))


# ---------------------------------------------------------------------------------------------------- plans, refusals


def problem(tokens, hidden, vocab=128256, **how):
    student = Head(tokens, hidden, vocab, "bfloat16", device="cuda", grad_hidden=True, grad_weight=True)
    teacher = replace(student, hidden=4096, grad_hidden=False, grad_weight=False)
    return JsdProblem(vocab, student, teacher, **({"stash": True} | how))


def planned(p, budget=None):
    made = memory.MOSAIC_PLANNER.plan(p, "", budget)
    budget = memory.MOSAIC_PLANNER.default(p, "") if budget is None else budget
    assert memory.MOSAIC_PLANNER.scratch_bytes(p, made) <= budget
    return made


def test_plans():
    assert planned(problem(4096, 4096), 1536 * MIB).way == "kept"
    assert planned(problem(65536, 2048), 5 << 30).way == "summed"  # logits' gradients would take more than sums
    assert planned(problem(65536, 2048), 40 << 30).way == "kept"
    assert planned(problem(4096, 4096), 300 * MIB).way == "again"
    assert planned(problem(4096, 4096, stash=False), 4 << 30).way == "kept"
    frozen = problem(4096, 4096)
    frozen = replace(frozen, student=replace(frozen.student, grad_weight=False))
    assert planned(frozen, 256 * MIB).way == "summed"  # of hidden's size
    nothing = replace(frozen, student=replace(frozen.student, grad_hidden=False))
    assert planned(nothing, 128 * MIB).way == "forward"
    with pytest.raises(ValueError, match="the smallest chunk needs"):
        planned(problem(4096, 4096), 64 * MIB)


@pytest.mark.parametrize("stash", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(4096, 4096, 128256), (16384, 2048, 151936), (512, 576, 4096)])
def test_by_default_logits_are_made_once(tokens, hidden, vocab, stash):
    p = problem(tokens, hidden, vocab, stash=stash)
    assert planned(p).way != "again"
    assert memory.MOSAIC_PLANNER.default(p, "") <= max(256 * MIB, 0.45 * memory.logits_bytes(p))


def test_chunks_of_the_vocabulary():
    for vocab in (128, 136, 520, 1000, 128256):
        for columns in (128, 512, 4096):
            whole, last = memory.vocab_chunks(vocab, min(vocab, columns))
            assert whole * min(vocab, columns) + last == vocab
            assert last == 0 or 128 <= last < columns + 128


@pytest.mark.usefixtures("on_hopper")
def test_refusals():
    h, w, x, v = heads()
    call = partial(linear_jsd, backend="mosaic_gpu")
    u = jnp.ones((2, 50, 520))
    for run, reason in (
        (lambda: call(h.astype("float32"), w.astype("float32"), x, v), "the student's are in float32"),
        (lambda: call(h, w, teacher_logits=u, teacher_grad=True), "no gradient to a linear student's teacher_logits"),
        (lambda: call(h, w[:130], x, v[:130]), "V to be a multiple of 8 from 128 on; got V=130"),
        (lambda: jsd(u[..., :64], u[..., :64], backend="mosaic_gpu"), "got V=64"),
    ):
        with pytest.raises(ValueError, match=f"backend 'mosaic_gpu' can't run this call: .*{reason}"):
            run()
    assert jsd(u[..., :64], u[..., :64]) == 0  # by 'xla'


def test_within_a_small_budget_auto_is_plain_jax(monkeypatch):
    monkeypatch.setattr(mosaic_walk, "hopper_refusal", lambda: None)
    monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
    forget()
    h, w, x, v = heads()
    assert jnp.isfinite(linear_jsd(h, w, x, v, scratch_bytes="16MiB"))
    with pytest.raises(ValueError, match="is too small"):
        linear_jsd(h, w, x, v, scratch_bytes="16MiB", backend="mosaic_gpu")
    forget()
