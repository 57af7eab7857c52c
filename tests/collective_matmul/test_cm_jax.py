"""Both functions under `jax.shard_map` on four devices: a script, whose process has four from the start."""

import itertools
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from onchip.collectives.problem import GATHER, SCATTER
from onchip.jax import all_gather_matmul, matmul_reduce_scatter
from onchip.ops.collective_matmul.cases import CollectiveCase
from onchip.ops.collective_matmul.checks import CHECKER

OPS = {GATHER: all_gather_matmul, SCATTER: matmul_reduce_scatter}


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_four_devices(more):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, __file__, *(["more"] if more else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [check.__name__ for check in (*CHECKS, *(MORE if more else ()))]


def assert_right(case, dtype, **how):
    wrong = [c for c in CHECKER.check_case(case, dtype, **how) if not c.ok]
    assert not wrong, wrong


def both_ways_of_shard_map():
    """Against the oracle: with check_vma and without, of each layout and dtype."""
    case = CollectiveCase("bias", 8, 12, 16, bias=True, middle=3)
    for i, dtype in zip((0, 3, 4), ("float32", "bfloat16", "float16"), strict=True):
        assert_right(case, dtype, **CHECKER.hows(partial_jax())[i], check_vma=i > 0)


def a_shared_bias():
    """Its gradient is summed over devices before it is rounded."""
    assert_right(CollectiveCase("bias", 8, 12, 16, bias=True), "bfloat16", op=SCATTER)


def no_tokens():
    """Forward and backward, where JAX 0.11.2 crashes on a shard_map with other uses of such arrays."""
    for op in OPS:
        assert_right(CollectiveCase("none", 0, 4, 8, bias=True), "float32", op=op)


def every_how_and_dtype():
    cases = (
        CollectiveCase("bias", 8, 12, 16, bias=True, middle=3),
        CollectiveCase("none", 0, 4, 8),
        CollectiveCase("plain", 24, 8, 4),
    )
    for dtype, case in zip(("float32", "bfloat16", "float16"), cases, strict=True):
        for how in CHECKER.hows(partial_jax()):
            for check_vma in (True, False):
                assert_right(case, dtype, **how, check_vma=check_vma)


class partial_jax:
    NAME = "jax"


def mesh(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "tp")[-len(shape) :])


def gradients_inside_and_two_axes():
    """Of an MLP on a mesh of data and tensor parallelism; JAX sums up what is the same on several devices."""
    rng = np.random.default_rng(0)
    x, up, down, bias = (jnp.float32(rng.standard_normal(s)) for s in ((8, 6), (10, 6), (6, 10), (6,)))

    def plain(x, up, down, bias):
        return jnp.square(jnp.tanh(x @ up.T) @ down.T + bias[None]).sum()

    def of_device(x, up, down, bias):
        def loss(x, up, down, bias):
            h = jnp.tanh(all_gather_matmul(x, up, "tp"))
            return jnp.square(matmul_reduce_scatter(h, down, "tp", bias=bias)).sum()

        value, grads = jax.value_and_grad(loss, (0, 1, 2, 3))(x, up, down, bias)
        return lax.psum(value, ("data", "tp")), grads

    tokens, specs = P(("data", "tp")), (P("tp"), P(None, "tp"), P())
    split = jax.shard_map(of_device, mesh=mesh(2, 2), in_specs=(tokens, *specs), out_specs=(P(), (tokens, *specs)))
    value, grads = jax.jit(split)(x, up, down, bias)
    right, expected = jax.value_and_grad(plain, (0, 1, 2, 3))(x, up, down, bias)
    np.testing.assert_allclose(value, right, rtol=1e-5)
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, other, rtol=1e-4, atol=1e-4)


def one_collective_and_one_product():
    """And of no tokens neither; sums travel in float32, or as the caller says."""
    for dtype, empty in itertools.product((None, "float32", "bfloat16"), (False, True)):
        x, w = jnp.ones((0 if empty else 8, 6), "bfloat16"), jnp.ones((12, 6), "bfloat16")
        for op, specs in {GATHER: (P("tp"), P("tp"), P(None, "tp")), SCATTER: (P(), P(), P("tp"))}.items():
            function = partial(OPS[op], axis_name="tp", reduce_dtype=dtype)
            split = jax.shard_map(function, mesh=mesh(4), in_specs=specs[:2], out_specs=specs[2], check_vma=False)
            text = str(jax.make_jaxpr(split)(x, w))
            assert text.count("dot_general[") == (not empty)
            of_op = {GATHER: "all_gather[", SCATTER: "reduce_scatter["}[op]
            for name in ("all_gather[", "reduce_scatter[", "psum", "all_to_all[", "ppermute["):
                assert text.count(name) == (name == of_op and not empty), (name, text)
            if op == SCATTER and not empty:
                (line,) = (line for line in text.splitlines() if of_op in line)
                assert {None: "f32", "float32": "f32", "bfloat16": "bf16"}[dtype] in line.split("=")[0]


def transforms():
    """vmap, a second derivative, which is refused, and names of axes."""
    xs, w = jnp.arange(48.0).reshape(2, 4, 6), jnp.ones((8, 6))

    def of_device(xs, w):
        return jax.vmap(lambda x: all_gather_matmul(x, w, "tp"))(xs)

    split = jax.shard_map(of_device, mesh=mesh(4), in_specs=(P(None, "tp"), P("tp")), out_specs=P(None, None, "tp"))
    np.testing.assert_allclose(jax.jit(split)(xs, w), xs @ w.T)

    for op, function in OPS.items():

        def twice(x, w, function=function):
            return jax.grad(lambda x: jax.grad(lambda x: function(x, w, "tp").sum())(x).sum())(x)

        split = jax.shard_map(twice, mesh=mesh(4), in_specs=(P("tp"), P("tp")), out_specs=P("tp"))
        with pytest.raises(NotImplementedError, match=f"{op}: differentiated twice"):
            jax.jit(split)(jnp.ones((16, 6)), jnp.ones((4, 6)))

    uneven = jax.shard_map(
        lambda x, w: matmul_reduce_scatter(x, w, "tp"), mesh=mesh(4), in_specs=(P(), P()), out_specs=P("tp")
    )
    message = (
        "matmul_reduce_scatter: x has 6 rows in its first dimension, which 4 ranks can't share evenly; pad it by 2 r"
    )
    with pytest.raises(ValueError, match=message):
        uneven(jnp.ones((6, 6)), w)


CHECKS = (
    both_ways_of_shard_map,
    a_shared_bias,
    no_tokens,
    gradients_inside_and_two_axes,
    one_collective_and_one_product,
    transforms,
)
MORE = (every_how_and_dtype,)
X, W, B = jnp.ones((6, 8)), jnp.ones((4, 8)), jnp.ones(4)
T_NK, T_KN = "weight must be [N, K]", "weight must be [K, N] with weight_layout='kn'"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, jnp.ones((4, 7)), "tp"), {}, ValueError, f"x has K=8 but weight has K=7; {T_NK}"),
        ((X, W, "tp"), {"weight_layout": "kn"}, ValueError, f"x has K=8 but weight has K=4; {T_KN}"),
        ((X, W, "tp"), {"weight_layout": "vh"}, ValueError, "weight_layout must be one of 'nk', 'kn'; got 'vh'"),
        ((X, W, ("tp",)), {}, TypeError, "axis_name must be a str, one axis of the mesh; got tuple"),
        ((X, W, "dp"), {}, ValueError, "there is no axis 'dp' here; call it inside jax.shard_map, over a mesh"),
        ((X, W, "tp"), {"reduce_dtype": "int8"}, ValueError, "reduce_dtype must be None, float32 or x's dtyp"),
        (([1.0], W, "tp"), {}, TypeError, "x must be a jax.Array or numpy.ndarray; got list; pass jax.numpy.asar"),
        ((X.astype(int), W, "tp"), {}, TypeError, "x must be float32, bfloat16, float16 or float64; got int32"),
        ((X, W.astype("bfloat16"), "tp"), {}, TypeError, "x is float32 but weight is bfloat16; cast one of them"),
        ((X, W, "tp"), {"bias": B.astype("float16")}, TypeError, "x is float32 but bias is float16; cast one of them"),
    ],
)  # fmt: skip
def test_wrong_calls(op, arguments, options, error, message):
    from shared import assert_refused  # not in the script: it imports PyTorch

    one = Mesh(np.array(jax.devices()[:1]), ("tp",))

    def call():
        jax.shard_map(lambda: OPS[op](*arguments, **options), mesh=one, in_specs=(), out_specs=P("tp"))()

    assert_refused(op, call, error, message)


def test_keep_gathered_is_a_flag():
    with pytest.raises(TypeError, match="all_gather_matmul: keep_gathered must be True or False; got int"):
        all_gather_matmul(X, W, "tp", keep_gathered=1)


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    for check in (*CHECKS, *(MORE if "more" in sys.argv else ())):
        check()
        print(check.__name__)
