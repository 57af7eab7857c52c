"""What every public function of the JAX front end refuses, in the op's words and with the remedy."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from onchip.jax import (
    TopK,
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
)

X, W, B, IDS = jnp.ones((4, 8)), jnp.ones((16, 8)), jnp.ones(16), jnp.zeros(4, jnp.int32)
Z, ONES = jnp.ones((4, 16)), jnp.ones(4)
ARRAYS = {
    cross_entropy: {"logits": Z, "labels": IDS, "token_weight": ONES, "class_weight": B},
    linear_cross_entropy: {
        "hidden": X, "weight": W, "labels": IDS, "bias": B, "token_weight": ONES, "class_weight": B
    },
    linear_log_probs: {"hidden": X, "weight": W, "ids": IDS, "bias": B},
    linear_jsd: {
        "student_hidden": X, "student_weight": W, "student_bias": B, "teacher_hidden": X, "teacher_weight": W,
        "teacher_bias": B, "labels": IDS, "token_weight": ONES,
    },
    jsd: {"student_logits": Z, "teacher_logits": Z, "labels": IDS, "token_weight": ONES},
    fp8_linear: {"x": X, "weight": W, "bias": B},
    grouped_matmul: {
        "x": X, "weight": W[None], "group_sizes": IDS[:1], "bias": B[None], "row_scale": ONES, "rows": IDS
    },
}  # fmt: skip
EACH = [(f, name) for f, arrays in ARRAYS.items() for name in arrays]
# A number or an array.
NUMBERS = [(f, "temperature") for f in (cross_entropy, linear_cross_entropy, linear_log_probs)]
NUMBERS += [(f, "normalizer") for f in (cross_entropy, linear_cross_entropy, linear_jsd, jsd)]
by_name = {"ids": lambda x: x if isinstance(x, str) else getattr(x, "__name__", None)}
BAD = {
    "Tensor": (lambda x: torch.from_numpy(np.array(x)), "got Tensor; pass jax.numpy.from_dlpack({})"),
    "Param": (lambda x: type("Param", (), {"__jax_array__": lambda self: x})(), "got Param; pass {}[...]"),  # Flax's
    "list": (lambda x: x.tolist(), "got list; pass jax.numpy.asarray({})"),
    "object": (lambda x: np.array(x, object), "{} holds Python objects; pass numbers, as by {}.astype(...)"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("function", "name"), [*EACH, *NUMBERS], **by_name)
def test_an_array_of_another_kind(function, name, bad):
    make, remedy = BAD[bad]
    expected = re.escape(remedy.format(name, name)) if name in ARRAYS[function] else f"{name} must be .*number|holds"
    with pytest.raises((TypeError, ValueError), match=rf"^{function.__name__}: .*({expected})"):
        function(**ARRAYS[function] | {name: make(ARRAYS[function].get(name, ONES))})


def test_a_teachers_topk_of_another_kind():
    topk = TopK(IDS[:, None].tolist(), ONES[:, None], "log_probs", "tail")
    with pytest.raises(TypeError, match=re.escape("pass jax.numpy.asarray(teacher_topk.indices)")):
        jsd(Z, teacher_topk=topk)


def test_the_largest_integers_are_fine():
    for value in (2**63 - 1, -(2**63)):
        assert jnp.isfinite(linear_cross_entropy(X, W, IDS, ignore_index=value, scratch_bytes=2**63 - 1))
