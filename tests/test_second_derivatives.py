"""Second derivatives of the losses raise, in whatever way they are asked for: no term is left out without a word."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onchip.jax as ops
import second_derivatives
from interpreter import run_all
from onchip.ops.linear_cross_entropy import jax_op, mosaic_op
from second_derivatives import HEAD, LOGITS, TOKENS, both, checks


@pytest.mark.parametrize("check", [pytest.param(c, id=name) for name, c in checks("torch").items()])
def test_torch(check):
    check()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_all(second_derivatives.__file__, list(second_derivatives.CHECKS), tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("name", second_derivatives.CHECKS)
def test_triton_interpreted(name, outcomes):
    said, errors = outcomes
    assert name in said, f"its process ended before it: {errors}"
    assert not said[name], said[name]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", second_derivatives.CHECKS)
def test_on_the_gpu(name, backend):
    checks(backend, "cuda")[name]()


@pytest.mark.parametrize(
    "check",
    [pytest.param(c, id=n) for n, c in checks("torch").items() if "mean" in n and "backward=True" not in n],
)
def test_the_loss_may_change_in_place_before_backward(check):
    """So the loss itself isn't what ties gradients to inputs."""
    op, inputs, constants, options, *_ = check.args
    made = op(**second_derivatives.tensors(inputs, constants), **options, backend="torch")
    made /= 2
    made.sum().backward()


JAX = {
    ops.linear_cross_entropy: (HEAD, [{"strategy": "stash"}, {"strategy": "recompute"}, {"backend": "mosaic_gpu"}]),
    ops.cross_entropy: ({"logits": LOGITS}, [{}]),
    ops.linear_log_probs: (HEAD, [{}]),
    ops.linear_jsd: (both("hidden", "weight", "bias"), [{"teacher_grad": True}]),
    ops.jsd: ({"student_logits": LOGITS, "teacher_logits": LOGITS}, [{"teacher_grad": True}]),
    ops.fp8_linear: ({"x" if k == "hidden" else k: shape for k, shape in HEAD.items()}, [{}]),
}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("op", "options"), [(op, o) for op, (_, several) in JAX.items() for o in several])
def test_jax(op, options, jit, monkeypatch):
    if "backend" in options:
        monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
        monkeypatch.setattr(mosaic_op, "refusal", lambda static, problem: None)
    shapes, _ = JAX[op]
    arrays = {k: np.ones(s, jnp.bfloat16) for k, s in shapes.items()} | {"upstream": np.float32(2)}
    labels = {} if op is ops.fp8_linear else {"ids" if op is ops.linear_log_probs else "labels": jnp.arange(TOKENS)}

    def loss(arrays):
        given = {k: x for k, x in arrays.items() if k != "upstream"}
        made = op(**given, **labels, **options)
        return arrays["upstream"] * sum(x.sum() for x in jax.tree.leaves(made))

    def by(f, name):
        return jax.grad(lambda x, arrays: f(arrays | {name: x}))

    for a, b, alone in product(shapes, arrays, (False, True)):
        g = jit(by(loss, a))

        def value(arrays, g=g, a=a, alone=alone):
            made = g(arrays[a], arrays)
            return made.sum() if alone else loss(arrays) + (made**2).sum()

        with pytest.raises(NotImplementedError, match="differentiated twice"):
            jax.eval_shape(by(value, b), arrays[b], arrays)  # it raises while it is traced
