"""Every way to call the JAX ops wrongly: the exception's type, and that it names the argument.  All errors are found
while tracing, so each call is made under `jax.eval_shape` too.
Arguments of another kind are in test_refusals.py, numbers and words in test_option_errors.py.
"""

import inspect
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.frontend.jax_inputs import platform
from onchip.jax import cross_entropy, linear_cross_entropy, linear_log_probs, log_probs
from onchip.vocab.xla import walk as jax_xla
from shared import assert_refused

rng = np.random.default_rng(0)
h, w, b = (jnp.float32(rng.standard_normal(shape)) for shape in ((2, 12, 16), (70, 16), 70))
y = jnp.asarray(rng.integers(70, size=(2, 12)), jnp.int32)
OPS = {
    linear_cross_entropy: {"hidden": h, "weight": w, "target": y, "bias": b},
    linear_log_probs: {"hidden": h, "weight": w, "ids": y, "bias": b},
    cross_entropy: {"logits": h @ w.T, "target": y},
    log_probs: {"logits": h @ w.T, "ids": y},
}


def call(op=linear_cross_entropy, **changes):
    arguments = OPS[op] | changes
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    rest = {name: x for name, x in arguments.items() if name not in arrays}
    return arrays, lambda arrays: op(**arrays, **rest)


ones = jnp.ones
LABELS = {"target": None}
# What is said whatever the op, of the arguments that it has.
EVERY = {
    # shapes
    "z_loss is 1-d": ({"z_loss": ones(24)}, ValueError, "z_loss must be a number or a 0-d array"),
    "label_smoothing is 2-d": ({"label_smoothing": ones((2, 12))}, ValueError, "label_smoothing must be a number or a 0-d array"),
    "softcap is a bool array": ({"softcap": ones((), bool)}, TypeError, "softcap must be a real number; got bool"),
    "weight is transposed": ({"weight": ones((16, 70))}, ValueError, "hidden has H=16 but weight has H=70; weight must be [V, H]; or pass weight_layout='hv'"),
    "weight of another H": ({"weight": ones((70, 17))}, ValueError, "hidden has H=16 but weight has H=17; weight must be [V, H]"),
    "layout of the transposed": ({"weight_layout": "hv"}, ValueError, "hidden has H=16 but weight has H=70; weight must be [H, V] with weight_layout='hv'; or pass weight_layout='vh'"),
    "weight is 1-d": ({"weight": ones(16)}, ValueError, "weight must be [V, H]"),
    "weight is 3-d": ({"weight": ones((2, 70, 16))}, ValueError, "weight must be [V, H]"),
    "weight has no rows": ({"weight": ones((0, 16))}, ValueError, "weight must be [V, H], V, H >= 1"),
    "H is 0": ({"hidden": ones((2, 12, 0)), "weight": ones((70, 0))}, ValueError, "V, H >= 1"),
    "hidden is 0-d": ({"hidden": ones(())}, ValueError, "hidden must be [..., H]"),
    "target too short": ({"target": jnp.zeros((2, 11), int)}, ValueError, "target has shape [2, 11]"),
    "labels too short": (LABELS | {"labels": jnp.zeros((2, 11), int)}, ValueError, "labels has shape [2, 11]"),
    "target is flat": ({"target": jnp.zeros(24, int)}, ValueError, "leading dimensions, [2, 12]"),
    "bias too long": ({"bias": ones(71)}, ValueError, "bias has shape [71] but weight has V=70"),
    "bias is 2-d": ({"bias": ones((1, 70))}, ValueError, "bias must be [V]"),
    "token_weight is flat": ({"token_weight": ones(24)}, ValueError, "token_weight has shape [24]; it must have target's shape, [2, 12]"),
    "temperature is flat": ({"temperature": ones(24)}, ValueError, "temperature has shape [24]"),
    "temperature is complex": ({"temperature": ones((2, 12), "complex64")}, TypeError, "temperature must be real"),
    "class_weight too long": ({"class_weight": ones(71)}, ValueError, "class_weight has shape [71]; it must be [V], [70]"),
    "class_weight is int": ({"class_weight": ones(70, int)}, TypeError, "class_weight must be float32; got int32"),
    "normalizer is 1-d": ({"normalizer": ones(1)}, ValueError, "normalizer must be a number or a 0-d array; got shape [1]"),
    # dtypes and types
    "weight is None": ({"weight": None}, TypeError, "weight must be a jax.Array or numpy.ndarray; got NoneType"),
    "target is None": ({"target": None}, TypeError, "target is missing or None; pass it (labels is another name for it)"),
    "target and labels": ({"target": y, "labels": y}, TypeError, "labels is another name for target; pass one of them"),
    "hidden is int": ({"hidden": ones((2, 12, 16), int)}, TypeError, "hidden must be float32"),
    "weight is float8": ({"weight": ones((70, 16), "float8_e4m3fn")}, TypeError, "weight must be float32, bfloat16, float16 or float64; got float8_e4m3fn"),
    "dtypes differ": ({"hidden": ones((2, 12, 16), "float16"), "weight": ones((70, 16), "bfloat16")}, TypeError, "hidden is float16 but weight is bfloat16, and neither dtype holds the other's numbers; cast one of them"),
    "bias dtype differs": ({"bias": ones(70, "bfloat16")}, TypeError, "hidden is float32 but bias is bfloat16"),
    "target is float": ({"target": ones((2, 12))}, TypeError, "target must hold integers; got float32"),
    "labels are float": (LABELS | {"labels": ones((2, 12))}, TypeError, "labels must hold integers; got float32"),
    "target is bool": ({"target": ones((2, 12), bool)}, TypeError, "target must hold integers; got bool"),
    "token_weight is complex": ({"token_weight": ones((2, 12), "complex64")}, TypeError, "token_weight must be real"),
    "normalizer is complex": ({"normalizer": ones((), "complex64")}, TypeError, "normalizer must be a real number"),
    "normalizer is a string": ({"normalizer": "12"}, TypeError, "normalizer must be a number; got str"),
    "normalizer is True": ({"normalizer": True}, TypeError, "normalizer must be a number; got bool"),
    "scratch_bytes is 1e9": ({"scratch_bytes": 1e9}, ValueError, "scratch_bytes=1000000000.0 is a float, a part of the float32 logits, and must be above 0 and at most 1; pass an int for bytes"),
    "scratch_bytes is 0.0": ({"scratch_bytes": 0.0}, ValueError, "must be above 0 and at most 1; pass an int for bytes"),
    "scratch_bytes is nan": ({"scratch_bytes": math.nan}, ValueError, "scratch_bytes=nan is a float"),
    "scratch_bytes is a list": ({"scratch_bytes": [1]}, TypeError, "scratch_bytes must be an int; got list"),
    "scratch_bytes has no unit": ({"scratch_bytes": "512"}, ValueError, "scratch_bytes as a text must be like '1GiB', '512 MiB' or '0.5 KiB'; got '512'"),
    "scratch_bytes in GB": ({"scratch_bytes": "1GB"}, ValueError, "scratch_bytes as a text must be like '1GiB'"),
    "scratch_bytes < 0": ({"scratch_bytes": "-1 GiB"}, ValueError, "scratch_bytes as a text must be like '1GiB'"),
    "scratch_bytes endless": ({"scratch_bytes": "9" * 400 + "GiB"}, ValueError, "scratch_bytes must fit in 64 bits"),
    "scratch_bytes no number": ({"scratch_bytes": "nanGiB"}, ValueError, "scratch_bytes as a text must be like '1GiB'"),
    # ranges
    "normalizer 0": ({"normalizer": 0}, ValueError, "normalizer must be above 0"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small for T=24, "),
    "scratch_bytes too few KiB": ({"scratch_bytes": "0.1 KiB"}, ValueError, "scratch_bytes=102 is too small for T=24, "),
    "scratch_bytes too small a part": ({"scratch_bytes": 0.01}, ValueError, "scratch_bytes=67 is too small for T=24, "),
    # options
    "nothing to shift along": ({"hidden": ones(16), "target": jnp.zeros((), int), "shift": True}, ValueError, "shift=True needs target of shape [..., S]"),
    "no logits to shift along": ({"logits": ones(70), "target": jnp.zeros((), int), "shift": True}, ValueError, "shift=True needs target of shape [..., S]"),
    "no ids to shift along": ({"hidden": ones(16), "ids": jnp.zeros((), int), "shift": True}, ValueError, "shift=True needs hidden of shape [..., S, H]"),
    "normalizer with sum": ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is what reduction='mean' divides by"),
    "logits is 0-d": ({"logits": ones(())}, ValueError, "logits must be [..., V]"),
    "V is 0": ({"logits": ones((2, 12, 0))}, ValueError, "logits must be [..., V] with V >= 1"),
    "logits is int": ({"logits": ones((2, 12, 70), int)}, TypeError, "logits must be float32"),
    "ids are flat": ({"ids": ones(24, int)}, ValueError, "ids has shape [24]"),
    "no ids": ({"ids": ones((2, 12, 0), int)}, ValueError, "[..., K] needs K >= 1"),
    "ids is None": ({"ids": None}, TypeError, "ids is missing or None; pass it (labels is another name for it)"),
    "ids and labels": ({"ids": y, "labels": y}, TypeError, "labels is another name for ids; pass one of them"),
    "ids are float": ({"ids": ones((2, 12))}, TypeError, "ids must hold integers; got float32"),
}  # fmt: skip
WRONG = [(op, name) for op in OPS for name in EVERY if {*EVERY[name][0]} <= {*inspect.signature(op).parameters}]


@pytest.mark.parametrize(("op", "name"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_wrong_call(op, name):
    changes, kind, message = EVERY[name]
    arrays, function = call(op, **changes)
    for run in (function, lambda arrays: jax.eval_shape(function, arrays)):
        assert_refused(op.__name__, partial(run, arrays), kind, message)


@pytest.mark.parametrize("strategy", ["auto", "stash", "recompute"])
def test_a_scratch_that_is_too_small_names_one_that_is_not(strategy):
    h, w, y = jnp.ones((200, 16)), jnp.ones((3000, 16)), jnp.zeros(200, jnp.int32)

    def step(budget):
        op = lambda h, w: linear_cross_entropy(h, w, y, strategy=strategy, scratch_bytes=budget)  # noqa: E731
        return jax.eval_shape(jax.grad(op, (0, 1)), h, w)

    with pytest.raises(ValueError, match="raise scratch_bytes") as caught:
        step(300_000)
    for number in re.findall(r"(\d+) bytes for strategy", str(caught.value)):
        step(int(number))


def test_an_unknown_argument():
    arrays, function = call(smoothing=0.1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        function(arrays)


def test_a_refused_backend_says_why(monkeypatch):
    monkeypatch.setattr(jax_xla, "refusal", lambda problem, platform, *_: f"not on {platform} in {problem.dtype}")
    arrays, function = call()
    with pytest.raises(
        ValueError, match=re.escape("no backend can run this call (xla: not on cpu in float32; mosaic_gpu: ")
    ):
        function(arrays)
    with pytest.raises(ValueError, match="backend 'xla' can't run this call: not on cpu"):
        call(backend="xla")[1](arrays)


def test_the_platform_is_the_default_devices():
    assert platform() == jax.default_backend()
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform() == "cpu"


def test_traced_values_are_not_checked():
    shape = jax.eval_shape(
        lambda x: linear_cross_entropy(h, w, y, b, label_smoothing=x, normalizer=x, softcap=x, temperature=x), 2.0
    )
    assert shape.shape == ()
    assert shape.dtype == jnp.float32
