"""The 'mosaic_gpu' backend of attention on a Hopper GPU: against the oracle, and what the CPU can't show."""

import itertools
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kernel_cases import KERNEL_CASES

from onchip.attention.problem import MOSAIC_SIZES
from onchip.jax import attention
from onchip.masks import Causal, Documents, Window
from onchip.ops.attention import reference
from onchip.ops.attention.cases import KINDS, AttentionCase, make_inputs
from onchip.ops.attention.checks import CHECKER, limits
from onchip.oracle.checks import relative_error
from shared import assert_within_bounds, pairs_once

pytestmark = pytest.mark.gpu
op = partial(attention, backend="mosaic_gpu")
CAUSAL = Causal()
LONG = AttentionCase("", "full", queries=700, keys=700, heads=4, key_heads=2, size=128, value_size=128)
CASES = (
    *KERNEL_CASES,
    *(replace(LONG, name=f"{kind}, long", mask=kind) for kind in KINDS if kind != "blocked"),
    replace(LONG, name="odd sizes", mask="tree", size=37, value_size=75, sinks=True),
    replace(LONG, name="a negative scale", mask="prefixes", options={"scale": -0.05}),
    replace(LONG, name="scores of 36", mask="images", std=6.0),
)


class Program(NamedTuple):
    """Masks are data: these cases have other masks and numbers, but the same sizes and options."""

    cases: list
    dtype: str
    layout: str

    def __str__(self):
        return f"{self.cases[0]}-{self.dtype}-{self.layout}"

    def traits(self):
        """What its kernels, and what is made around them, depend on."""
        case = self.cases[0]
        heads = case.key_heads, case.heads // case.key_heads
        longer = (case.queries > case.keys) - (case.queries < case.keys)
        tiles = -(-case.queries // 128) > 1, case.queries % 128 == case.keys % 128 == 0
        sizes = next(x for x in MOSAIC_SIZES if x[0] >= case.size and x[1] >= case.value_size)
        large = sizes, sizes == (case.size, case.value_size)
        of_case = large, heads, longer, tiles, case.sinks, tuple(case.options)
        return *of_case, len(self.cases) > 3, self.dtype, self.layout


def programs():
    made = {}
    for case in CASES:
        made.setdefault(repr(replace(case, name="", mask="", std=1.0)), []).append(case)
    ways = itertools.cycle(itertools.product(("bfloat16", "float16"), ("bthd", "bhtd")))
    return [Program(cases, *way) for cases, way in zip(made.values(), ways, strict=False)]


@partial(jax.jit, static_argnames=("layout", "scale", "softcap"))
def results(given, mask, upstream, layout, **options):
    """By the oracle's names."""

    def values(given):
        q, k, v, sinks = given
        if layout == "bhtd":
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out, lse = op(q, k, v, mask, sinks=sinks, layout=layout, return_lse=True, **options)
        return (out.swapaxes(1, 2), lse.swapaxes(1, 2)) if layout == "bhtd" else (out, lse)

    made, pull = jax.vjp(values, given)
    (gradients,) = pull(tuple(x.astype(y.dtype) for x, y in zip(upstream, made, strict=True)))
    return dict(zip(("out", "lse", "grad_q", "grad_k", "grad_v", "grad_sinks"), (*made, *gradients), strict=True))


def is_right(case, dtype, layout):
    """Within the limits that need no plain expression."""
    inputs = make_inputs(case)
    given = [None if x is None else jnp.asarray(x, dtype) for x in inputs[:4]]
    drawn = case.drawn
    with jax.default_device(jax.devices("cpu")[0]):
        low = case.make_mask(jnp.asarray).lower(*drawn, jnp.zeros(1))
        mask = jax.tree.map(lambda x: np.broadcast_to(x, (case.batch, x.shape[-1])), low)
    made = results(given, mask, (inputs.grad_out, inputs.grad_lse), layout, **case.options)
    exact = [None if x is None else np.float64(x) for x in given]
    oracle = reference.attention(
        *exact[:3], case.seen(), sinks=exact[3], grad_out=inputs.grad_out, grad_lse=inputs.grad_lse, **case.options
    )
    right = limits(case, dtype, {"backend": "mosaic_gpu"}, oracle, {})
    return all(relative_error(np.float32(made[name]), x) <= limit for name, (x, limit) in right.items())


@pairs_once("program", programs(), Program.traits)
def test_cases(program):
    _, dtype, layout = program
    for case in program.cases:
        if not is_right(case, dtype, layout):
            assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", layout=layout, backend="mosaic_gpu"))


def drawn(batch=2, tokens=1000, heads=4, key_heads=2, size=128):
    rng = np.random.default_rng(0)
    shapes = [(batch, tokens, h, size) for h in (heads, key_heads, key_heads)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def loss(q, k, v, mask, sinks, op=op):
    out, lse = op(q, k, v, mask, sinks=sinks, softcap=20.0, return_lse=True)
    # Numbers that no compiler rounds in its own way: wholes of 32.
    weights = (jnp.arange(out.size).reshape(out.shape) * 5 % 67 - 33) / 32
    return (out.astype(jnp.float32) * weights).sum() + (lse**2).sum()


def documents(other=CAUSAL):
    ids = jnp.asarray(np.random.default_rng(1).random((2, 1000)) < 0.01).cumsum(1)
    return (Documents(ids) & other).lower(2, 1000, 1000, ids)


def test_runs_and_transformations_agree():
    """The same bits from run to run, under checkpoint and vmap; in a shard_map XLA may sum delta in another order."""
    given, sinks, mask = drawn(), jnp.ones(4), documents()
    step = jax.jit(jax.grad(loss, (0, 1, 2, 4)))
    right = step(*given, mask, sinks)

    def same(made, right=right):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.float32(x), np.float32(y)), made, right)

    for _ in range(50):
        same(step(*given, mask, sinks))
    same(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2, 4)))(*given, mask, sinks))
    alone = jax.tree.map(lambda x: x[:, None], (*given, mask))
    of_one = jax.grad(loss, (0, 1, 2))
    each = [jax.jit(of_one)(*jax.tree.map(lambda x, i=i: x[i], alone), sinks) for i in range(2)]
    made = jax.jit(jax.vmap(of_one, in_axes=(0, 0, 0, 0, None)))(*alone, sinks)
    same(made, jax.tree.map(lambda *x: jnp.stack(x), *each))
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    P = jax.sharding.PartitionSpec
    split = P("data", None, "model")
    specs = (split, split, split, P("data"), P("model"))
    mapped = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=(split,) * 3)
    for made, expected in zip(jax.jit(mapped)(*given, mask, sinks), right[:3], strict=True):
        made, expected = np.float32(made), np.float32(expected)
        assert np.linalg.norm(made - expected) <= 1e-4 * np.linalg.norm(expected)


def test_layers_in_a_scan():
    def layers(x, masks):
        def layer(x, mask):
            out = op(x, x[:, :, :2], x[:, :, 2:], mask, softcap=20.0)
            return (x + out).astype(x.dtype), None

        return jax.lax.scan(layer, x, masks)[0].astype(jnp.float32).sum()

    stacked = jax.tree.map(lambda *x: jnp.stack(x), documents(), documents(Window(100)))

    def unrolled(x, masks):
        for i in range(2):
            mask = jax.tree.map(lambda a, i=i: a[i], masks)
            x = (x + op(x, x[:, :, :2], x[:, :, 2:], mask, softcap=20.0)).astype(x.dtype)
        return x.astype(jnp.float32).sum()

    made, plain = (jax.jit(jax.grad(f))(drawn()[0], stacked) for f in (layers, unrolled))
    made, plain = np.float64(made), np.float64(plain)  # of which sums have other orders
    assert np.linalg.norm(made - plain) < 1e-2 * np.linalg.norm(plain)


def test_auto_takes_the_kernels_where_it_can():
    q, k, v = drawn(tokens=128)
    assert "mosaic_gpu" in jax.jit(attention).lower(q, k, v).as_text()
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    assert "mosaic_gpu" not in jax.jit(attention).lower(*wide).as_text()


def test_another_mask_compiles_nothing():
    q, k, v = drawn()
    step = jax.jit(op)
    for mask in (Causal(), Window(5, 3), Documents(jnp.arange(1000) // 7)):
        step(q, k, v, mask.lower(2, 1000, 1000, q))
    assert step._cache_size() == 1


@pytest.mark.parametrize("size", [64, 128])
def test_hidden_tokens_leak_nothing(size):
    """Of other tiles, whatever they hold; and a gradient of queries that see nothing may be anything."""
    q, k, v = drawn(batch=1, size=size)
    mask = Documents(jnp.arange(1000) // 384, padding=2) & Causal()  # of whole tiles of 128 and of 192

    def run(q, k, v, upstream):
        out, pull = jax.vjp(lambda *x: op(*x, mask), q, k, v)
        return out, *pull(upstream)

    upstream = jnp.ones_like(q)
    right = jax.jit(run)(q, k, v, upstream)
    broken = [x.at[:, 384:428].set(jnp.nan) for x in (q, k, v)]
    made = jax.jit(run)(*broken, upstream.at[:, 384:428].set(jnp.nan).at[:, 800:].set(jnp.nan))
    for x, y in zip(made, right, strict=True):
        for part in (slice(0, 384), slice(768, None)):
            np.testing.assert_array_equal(np.float32(x[:, part]), np.float32(y[:, part]))
    assert jnp.isnan(made[0][:, 384:428]).all()
    assert not right[0][:, 768:].any()
    assert not any(g[:, 768:].any() for g in right[1:])


# ------------------------------------------------------------------------------------------ all gradients in one kernel

FUSED_CASES = [
    AttentionCase(f"{mask}, {size}, groups of {heads // key_heads}", mask, batch=batch, queries=queries, keys=keys,
                  heads=heads, key_heads=key_heads, size=size, value_size=values, std=1.0 if cap is None else 2.0,
                  sinks=cap is not None, options={} if cap is None else {"softcap": cap})
    for size, values in ((64, 64), (48, 40))
    for mask, batch, queries, keys, heads, key_heads, cap in (
        ("causal", 2, 1000, 1000, 4, 1, None),
        ("full", 2, 584, 584, 3, 3, None),
        ("causal", 1, 777, 777, 6, 2, 5.0),
        ("causal, last sees last", 1, 93, 700, 2, 2, None),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", FUSED_CASES, ids=str)
def test_one_kernel_makes_all_gradients(case):
    number = FUSED_CASES.index(case)
    how = {"layout": ("bthd", "bhtd")[number % 2]}
    dtype = ("bfloat16", "float16")[number // 2 % 2]
    assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", backend="mosaic_gpu", **how))


def test_one_kernel_has_the_same_bits():
    """From run to run, in each step of a scan, and of a sequence alone or mapped.  In another program XLA may sum delta
    in another order, and two kernels have bits of their own."""
    given = drawn(size=64)

    def gradients(q, k, v, mask=CAUSAL):
        return jax.grad(lambda *x: loss(*x, mask, None), (0, 1, 2))(q, k, v)

    def same(made, right):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.float32(x), np.float32(y)), list(made), list(right))

    def close(made, right, bound=1e-4):
        for x, y in zip(made, right, strict=True):
            x, y = np.float64(x), np.float64(y)
            assert np.linalg.norm(x - y) <= bound * np.linalg.norm(y)

    step = jax.jit(gradients)
    assert step.lower(*given).as_text().count("custom_call @mosaic_gpu") == 2
    right = step(*given)
    for _ in range(50):
        same(step(*given), right)
    _, scanned = jax.jit(lambda *x: jax.lax.scan(lambda _, x: (None, gradients(*x)), None, x))(
        *(jnp.stack([x, x]) for x in given)
    )
    mapped = jax.jit(jax.vmap(gradients))(*(x[:, None] for x in given))
    same([x[0] for x in scanned], [x[1] for x in scanned])
    close([x[0] for x in scanned], right)
    for i in range(2):
        same([x[i] for x in mapped], step(*(x[i : i + 1] for x in given)))
    P = jax.sharding.PartitionSpec
    split = P("data", None, "model")
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=(split,) * 3, out_specs=(split,) * 3)
    close(jax.jit(mapped)(*given), right)
    hides_nothing = replace(CAUSAL.lower(2, 1000, 1000, given[0]), stop=jnp.full((2, 1000), 1000, jnp.int32))
    close(jax.jit(gradients)(*given, hides_nothing), right, 5e-3)
