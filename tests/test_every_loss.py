"""What holds for every op and backend: second derivatives raise, whichever way they are asked for, and a normalizer of
0 is handled.  test_interpreted.py has the kernels on the CPU.
"""

from itertools import cycle, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onchip.jax as ops
from every_loss import HEAD, LOGITS, TOKENS, both, checks
from onchip.ops.linear_cross_entropy import jax_op
from onchip.vocab.mosaic import op as mosaic_op

# A compiled call takes over a second: of most ops one, and of each kind of label and precision.
SLOW = {f"compiled-{x}" for x in (
    "linear_cross_entropy-recompute-mean", "linear_cross_entropy-soft-mean-dense=True",
    "cross_entropy-mean-inplace_backward=False",
    "cross_entropy-soft-mean-dense=True", "cross_entropy-soft-mean-dense=False", "log_probs",
    "jsd-mean-teacher_grad=True", "registered_fp8_linear", "quantised_fp8_linear",
)}  # fmt: skip
assert checks("plain").keys() >= SLOW


@pytest.mark.parametrize(
    "check",
    [pytest.param(c, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, c in checks("plain").items()],
)
def test_torch(check):
    check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=[pytest.mark.slow] * (name in SLOW and "jsd" not in name))
        for backend in ("plain", "triton")
        for name in checks(backend, "cuda")
    ],
)
def test_on_the_gpu(name, backend):
    checks(backend, "cuda")[name]()


JAX = {
    ops.linear_cross_entropy: (HEAD, [{"strategy": "stash"}, {"strategy": "recompute"}, {"backend": "mosaic_gpu"}]),
    ops.cross_entropy: ({"logits": LOGITS}, [{}]),
    ops.linear_log_probs: (HEAD, [{}]),
    ops.log_probs: ({"logits": LOGITS}, [{}]),
    ops.linear_jsd: (both("hidden", "weight", "bias"), [{"teacher_grad": True}]),
    ops.jsd: ({"student_logits": LOGITS, "teacher_logits": LOGITS}, [{"teacher_grad": True}]),
    ops.fp8_linear: ({"x" if k == "hidden" else k: shape for k, shape in HEAD.items()}, [{}]),
}
OF_IDS = (ops.linear_log_probs, ops.log_probs)


@pytest.mark.parametrize(
    ("op", "options", "jit"),
    [
        pytest.param(op, o, (jax.jit, lambda f: f)[i % 2], marks=[pytest.mark.slow] if op in OF_IDS else [])
        for i, (op, (_, several)) in enumerate(JAX.items())
        for o in several
    ],
)
def test_jax_differentiated_twice(op, options, jit, monkeypatch):
    if "backend" in options:
        monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
        monkeypatch.setattr(mosaic_op, "refusal", lambda *_: None)
    shapes, _ = JAX[op]
    arrays = {k: np.ones(s, jnp.bfloat16) for k, s in shapes.items()} | {"upstream": np.float32(2)}
    labels = {} if op is ops.fp8_linear else {"ids" if op in OF_IDS else "target": jnp.arange(TOKENS)}

    def loss(arrays):
        given = {k: x for k, x in arrays.items() if k != "upstream"}
        made = op(**given, **labels, **options)
        return arrays["upstream"] * sum(x.sum() for x in jax.tree.leaves(made))

    def by(f, name):
        return jax.grad(lambda x, arrays: f(arrays | {name: x}))

    for (a, b), alone in zip(product(shapes, arrays), cycle((False, True)), strict=False):
        g = jit(by(loss, a))

        def value(arrays, g=g, a=a, alone=alone):
            made = g(arrays[a], arrays)
            return made.sum() if alone else loss(arrays) + (made**2).sum()

        with pytest.raises(NotImplementedError, match="differentiated twice"):
            jax.eval_shape(by(value, b), arrays[b], arrays)  # it raises while it is traced


# Those of Mosaic are of whole tiles.
WHOLE = {"hidden": (128, 128), "weight": (256, 128)}
NORMALIZED = [(op, *JAX[op]) for op in (ops.linear_cross_entropy, ops.cross_entropy, ops.linear_jsd)]


@pytest.mark.parametrize(
    ("op", "shapes", "options"),
    [
        pytest.param(op, WHOLE if "backend" in o else shapes, o, marks=[pytest.mark.gpu] * ("backend" in o))
        for op, shapes, several in NORMALIZED
        for o in several
    ],
)
def test_jax_normalizer_of_zero(op, shapes, options):
    arrays = {k: jnp.ones(s, jnp.bfloat16) for k, s in shapes.items()}
    tokens = next(iter(shapes.values()))[0]

    @jax.jit
    def run(arrays, labels):
        return jax.value_and_grad(lambda x: op(**x, labels=labels, normalizer=np.float32(0), **options))(arrays)

    loss, gradients = run(arrays, jnp.full(tokens, -100))
    assert loss == 0
    assert not any(g.any() for g in jax.tree.leaves(gradients))
    assert not jnp.isfinite(run(arrays, jnp.zeros(tokens, jnp.int32))[0])


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=[pytest.mark.slow] * (op in (ops.log_probs, *list(JAX)[-3:]))) for op in JAX],
)
def test_jax_takes_numpy_float64_as_float32_outside_of_64_bit_mode(op):
    rng = np.random.default_rng(0)
    arrays = {k: rng.standard_normal(s) for k, s in JAX[op][0].items()}
    labels = {} if op is ops.fp8_linear else {"ids" if op in OF_IDS else "target": np.arange(TOKENS)}

    def run(arrays):
        return jax.value_and_grad(lambda x: op(**x, **labels).sum())(arrays)

    expected = run({k: x.astype(np.float32) for k, x in arrays.items()})
    assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (run(arrays), expected)), strict=True))
    assert op(**arrays, **labels).dtype == jnp.float32
    with jax.enable_x64(True):
        if op is ops.fp8_linear:
            with pytest.raises(TypeError, match="x must be float32, bfloat16 or float16; got float64"):
                op(**arrays)
        else:
            assert op(**arrays, **labels).dtype == jnp.float64
    name = next(iter(arrays))
    with pytest.raises(TypeError, match=f"{name} must be a jax.Array or numpy.ndarray; got list"):
        op(**arrays | {name: arrays[name].tolist()}, **labels)
