"""attention in JAX: the oracle, and its transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import attention
from onchip.masks import Blocks, Causal, Documents, Tree, Window
from onchip.ops.attention.cases import CHECK_CASES
from onchip.ops.attention.checks import CHECKER
from onchip.plan import plan
from shared_jax import assert_same

QUICK = ("causal documents", "no keys", "many tiles", "everything", "shared prompt", "blocked", "sinks alone")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c.name not in QUICK)) for c in CHECK_CASES], ids=str
)
def test_every_case_in_one_dtype(case):
    number = CHECK_CASES.index(case)
    how = {"layout": ("bthd", "bhtd")[number % 2]}
    dtype = ("float32", "bfloat16", "float16")[number % 3]
    checks = CHECKER.check_case(case, dtype, **how)
    assert all(check.ok for check in checks), checks


def drawn(batch=2, tokens=12, heads=4, key_heads=2, size=8):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal((batch, tokens, h, size)), jnp.float32) for h in (heads, key_heads, key_heads)
    ]


IDS = jnp.asarray([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])


def loss(q, k, v, ids, **options):
    out, lse = attention(q, k, v, Documents(ids) & Causal(), return_lse=True, **options)
    return (out * jnp.linspace(-1, 1, out.size, dtype=out.dtype).reshape(out.shape)).sum() + (lse**2).sum()


def test_jit_remat_scan_and_vmap():
    given, step = drawn(), jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    right = step(*given, IDS)
    assert_same(jax.jit(jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2)))(*given, IDS), right)
    each = jax.vmap(jax.value_and_grad(lambda q, k, v, ids: loss(q, k, v, ids), (0, 1, 2)))
    alone = [step(*(x[i] for x in given), IDS[i]) for i in range(2)]
    assert_same(jax.jit(each)(*given, IDS), jax.tree.map(lambda *x: jnp.stack(x), *alone))

    def layer(x, left):
        return x + attention(x, x[:, :, :2], x[:, :, 2:], Window(3) & Documents(IDS + 0 * left)), None

    def layers(x):
        return jax.lax.scan(layer, x, jnp.arange(2))[0].sum()

    def unrolled(x):
        for left in range(2):
            x, _ = layer(x, left)
        return x.sum()

    assert_same(*(jax.jit(jax.value_and_grad(f))(given[0]) for f in (layers, unrolled)))


def test_masks_are_lowered_under_jit_and_pass_through_it():
    q, k, v = drawn()
    mask = Documents(IDS) & Causal()
    lowered = jax.jit(lambda ids: (Documents(ids) & Causal()).lower(2, 12, 12, q))(IDS)
    assert_same(attention(q, k, v, lowered), attention(q, k, v, mask))
    assert_same(jax.jit(attention)(q, k, v, mask), attention(q, k, v, mask))


def test_masks_make_nothing_of_queries_by_keys():
    tokens = 1 << 14
    ids = jnp.arange(tokens) // 100
    make = jax.jit(lambda ids: (Blocks(ids) & Tree(ids + 5) & Window(9, None)).lower(1, tokens, tokens, ids))
    assert make.lower(ids).compile().memory_analysis().temp_size_in_bytes < 200 * tokens


def test_shard_map_over_batch_and_heads():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    given, P = drawn(), jax.sharding.PartitionSpec
    split = P("data", None, "model")

    def step(q, k, v, ids):
        value, grads = jax.value_and_grad(loss, (0, 1, 2))(q, k, v, ids)
        return jax.lax.psum(value, ("data", "model")), grads

    run = jax.shard_map(step, mesh=mesh, in_specs=(split, split, split, P("data")), out_specs=(P(), (split,) * 3))
    assert_same(jax.jit(run)(*given, IDS), jax.value_and_grad(loss, (0, 1, 2))(*given, IDS))


def test_a_sequence_that_is_sharded_by_its_type_raises():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    P = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, P(None, "data")) for x in drawn()]
        with pytest.raises(ValueError, match="by its type q has its tokens sharded over 'data'"):
            jax.jit(attention)(*given)


def test_nan_stays_where_it_is_seen():
    given = drawn(batch=1)
    mask = Documents(IDS[:1]) & Causal()
    right = attention(*given, mask)
    for n in range(3):
        broken = [x.at[:, 2].set(jnp.nan) if i == n else x for i, x in enumerate(given)]
        out = attention(*broken, mask)
        assert jnp.array_equal(out[:, 5:], right[:, 5:])
        assert jnp.array_equal(out[:, :2], right[:, :2])
        assert jnp.isnan(out[:, 2 : 3 if n == 0 else 5]).all()
        grads = jax.grad(lambda q, k, v: attention(q, k, v, mask)[:, 5:].sum(), (0, 1, 2))(*broken)
        assert all(jnp.isfinite(g[:, 5:]).all() for g in grads)


def test_a_gradient_of_rows_that_see_nothing_may_be_anything():
    q, k, v = drawn(batch=1)
    sinks = jnp.ones(4)
    mask = Documents(IDS[:1], padding=1) & Causal()
    found = []
    for value in (0.0, jnp.nan):
        out, pull = jax.vjp(lambda *x: attention(*x[:3], mask, sinks=x[3]), q, k, v, sinks)
        found.append(pull(jnp.ones_like(out).at[:, 5:].set(value)))
    assert_same(*found)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "mask must be one of", lambda q, k, v: attention(q, k, v, "causal")),
        (TypeError, "Documents.ids must be integers", lambda q, k, v: attention(q, k, v, Documents(IDS * 1.0))),
        (TypeError, "Documents.ids must be an array", lambda q, k, v: attention(q, k, v, Documents([0, 1]))),
        (ValueError, r"Documents.ids must be \[2, 12\]", lambda q, k, v: attention(q, k, v, Documents(IDS[:, :3]))),
        (ValueError, "must begin with 0", lambda q, k, v: Documents.from_cu_seqlens(jnp.array([5, 7]), 12)),
        (ValueError, "in two places", lambda q, k, v: attention(q, k, v, Documents(IDS.at[:, -1].set(0)))),
        (
            ValueError,
            "no values while they are traced",
            lambda *given: jax.jit(lambda ids: attention(*given, Causal() & Documents(ids), check_inputs=True))(IDS),
        ),
        (TypeError, "q is float32 but v is bfloat16", lambda q, k, v: attention(q, k, v.astype("bfloat16"))),
        (ValueError, "isn.t a multiple", lambda q, k, v: attention(q[:, :, :3], k, v)),
        (ValueError, "backend must be one of", lambda q, k, v: attention(q, k, v, backend="cudnn")),
        (TypeError, "q must be", lambda q, k, v: attention(q.tolist(), k, v)),
        (
            NotImplementedError,
            "differentiated twice",
            lambda q, k, v: jax.hessian(lambda q: attention(q, k, v).sum())(q),
        ),
        (TypeError, "custom_vjp", lambda q, k, v: jax.jvp(lambda q: attention(q, k, v), (q,), (q,))),
    ],
)
def test_what_is_wrong_raises(error, message, call):
    with pytest.raises(error, match=message):
        call(*drawn())


@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(8, 2, 64), pytest.param(4, 4, 128, marks=pytest.mark.slow), (6, 2, 24)]
)
@pytest.mark.parametrize("gradients", [False, True])
def test_memory_is_what_the_plan_says(heads, key_heads, size, gradients):
    def call(q, k, v):
        return attention(q, k, v, backend="xla")

    def grads(q, k, v, upstream):
        return jax.vjp(call, q, k, v)[1](upstream)

    shapes = [(2, 2048, n, size) for n in (heads, key_heads, key_heads, heads)]
    given = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
    lowered = jax.jit(grads).lower(*given) if gradients else jax.jit(call).lower(*given[:3])
    known = lowered.compile().memory_analysis().temp_size_in_bytes
    more = {"framework": "jax", "device": "cpu", "gradients": gradients}
    made = plan("attention", batch=2, sequence=2048, heads=heads, key_heads=key_heads, head_size=size, **more)
    row = made.row("default")
    assert 0.85 <= row.memory_bytes / known <= 1.3
    least = row.memory_bytes
    for bound, suffices in ((least, True), (least - 1, False)):

        def bounded(q, k, v, bound=bound):
            return attention(q, k, v, backend="xla", scratch_bytes=bound)

        run = jax.grad(lambda *x: bounded(*x).sum().astype(jnp.float32)) if gradients else bounded
        if suffices:
            jax.eval_shape(run, *given[:3])
        else:
            with pytest.raises(ValueError, match=f"scratch_bytes={bound} is too small; the call needs {least} bytes"):
                jax.eval_shape(run, *given[:3])
