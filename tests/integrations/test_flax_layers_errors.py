"""Every wrong call of Flax's layers in FP8 and of its mixtures of experts says what is wrong."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from onchip.integrations.flax import Fp8Dense, Fp8Linear, LinenMoE, MoE

x = jnp.ones((4, 6, 16))


def made(kind, *sizes, **options):
    return kind(*sizes, **options, rngs=nnx.Rngs(0))


def called(given, **named):
    return MoE(16, 24, 6, 2, rngs=nnx.Rngs(0))(given, **named)


WRONG = {
    "dot_general": (lambda: made(Fp8Linear, 16, 8, dot_general=print), ValueError, "Fp8Linear: dot_general must be left out"),
    "precision": (lambda: made(Fp8Linear, 16, 8, precision="highest"), ValueError, "precision must be left out, as the products are of FP8"),
    "preferred_element_type": (lambda: made(Fp8Linear, 16, 8, preferred_element_type=jnp.float32), ValueError, "preferred_element_type must be left out"),
    "scale": (lambda: made(Fp8Linear, 16, 8, scale="int8"), ValueError, "scale must be one of 'float32', 'power_of_two'; got 'int8'"),
    "grad_dtype": (lambda: made(Fp8Linear, 16, 8, grad_dtype="e3m4"), ValueError, "grad_dtype must be one of 'e4m3', 'e5m2'; got 'e3m4'"),
    "backend of a linear layer": (lambda: made(Fp8Linear, 16, 8, backend="triton"), ValueError, "Fp8Linear: backend must be one of 'auto', 'mosaic_gpu', 'xla'; got 'triton'"),
    "no such argument": (lambda: made(Fp8Linear, 16, 8, bias=True), TypeError, "unexpected keyword argument 'bias'"),
    "a narrow input": (lambda: made(Fp8Linear, 16, 8)(x[..., 1:]), ValueError, "fp8_linear: x has K=15 but weight has K=16"),
    "a dense layer's product": (lambda: Fp8Dense(8, dot_general_cls=print).init(jax.random.key(0), x), ValueError, "Fp8Dense: dot_general_cls must be left out"),
    "a dense layer's scale": (lambda: Fp8Dense(8, scale="int8").init(jax.random.key(0), x), ValueError, "scale must be one of"),
    "hidden": (lambda: made(MoE, 0, 8, 4, 2), ValueError, "MoE: hidden must be 1 or more; got 0"),
    "intermediate": (lambda: made(MoE, 16, 8.0, 4, 2), TypeError, "MoE: intermediate must be an int; got float"),
    "num_shared": (lambda: made(MoE, 16, 8, 4, 2, num_shared=-1), ValueError, "MoE: num_shared must be 0 or more; got -1"),
    "top_k": (lambda: made(MoE, 16, 8, 4, 5), ValueError, "MoE: top_k must be at most num_experts=4; got 5"),
    "scoring": (lambda: made(MoE, 16, 8, 4, 2, scoring="relu"), ValueError, "MoE: scoring must be one of 'softmax', 'sigmoid'; got 'relu'"),
    "norm_topk": (lambda: made(MoE, 16, 8, 4, 2, norm_topk=1), TypeError, "MoE: norm_topk must be True or False; got int"),
    "n_group": (lambda: made(MoE, 16, 8, 4, 2, n_group=3, topk_group=2), ValueError, "MoE: n_group=3 must divide the 4 experts"),
    "use_bias": (lambda: made(MoE, 16, 8, 4, 2, use_bias="no"), TypeError, "MoE: use_bias must be True or False; got str"),
    "correction_bias": (lambda: made(MoE, 16, 8, 4, 2, correction_bias=x), TypeError, "MoE: correction_bias must be True or False"),
    "param_dtype": (lambda: made(MoE, 16, 8, 4, 2, param_dtype=jnp.int8), TypeError, "MoE: param_dtype must be a floating-point dtype; got"),
    "backend": (lambda: made(MoE, 16, 8, 4, 2, backend="pallas"), ValueError, "MoE: backend must be one of 'auto', 'mosaic_gpu', 'xla', 'triton'; got 'pallas'"),
    "x is ids": (lambda: called(jnp.ones((2, 16), int)), TypeError, "MoE: x must have a floating-point dtype; got int32"),
    "x is a list": (lambda: called([1.0] * 16), TypeError, "MoE: x must be a jax.Array or numpy.ndarray; got list"),
    "x is narrow": (lambda: called(x[..., 1:]), ValueError, "MoE: x must be [..., H] with H=16; got shape [4, 6, 15]"),
    "return_stats": (lambda: called(x, return_stats=1), TypeError, "MoE: return_stats must be True or False; got int"),
    "no correction": (lambda: made(MoE, 16, 8, 4, 2).update_correction_bias(jnp.ones(4)), ValueError, "the layer has none; make it with correction_bias=True"),
    "counts of other experts": (lambda: made(MoE, 16, 8, 4, 2, correction_bias=True).update_correction_bias(jnp.ones(5)), ValueError, "counts has shape [5] but correction_bias has [4]"),
    "linen's top_k": (lambda: LinenMoE(8, 4, 5).init(jax.random.key(0), x), ValueError, "LinenMoE: top_k must be at most num_experts=4; got 5"),
    "linen's x": (lambda: LinenMoE(8, 4, 2).init(jax.random.key(0), jnp.float32(1)), ValueError, "LinenMoE: x must be [..., H]; got shape []"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()
