"""JAX's 'triton' backend without a GPU: its kernels compiled for several, plans and refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch
from ahead_of_time import compile_all

from onchip.jax import linear_cross_entropy
from onchip.ops.linear_cross_entropy import jax_op
from onchip.ops.linear_cross_entropy.cases import MODELS
from onchip.vocab.memory import Problem
from onchip.vocab.triton import jax_calls as jax_triton_calls
from onchip.vocab.triton import jax_op as jax_triton
from onchip.vocab.triton.launches import Launch

# Bytes of shared memory that a block may use, by compute capability.
SHARED = {"8.6": 101376, "9.0": 232448}
ENTRIES = {"enter_softmax_tiles", "enter_gradient_tiles", "enter_hidden_gradient", "enter_weight_gradient"}
EVERYTHING = {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3, "return_stats": True}


# ------------------------------------------------------------------------------------------------ compiled for CUDA


@pytest.fixture
def launched(monkeypatch):
    """What is launched while the op is traced as on a GPU."""
    found = []

    def record(*arrays, kernel, out_shape, grid, num_warps, num_stages, input_output_aliases=None, **constants):
        for i, output in (input_output_aliases or {}).items():
            assert (arrays[i].shape, arrays[i].dtype) == (out_shape[output].shape, out_shape[output].dtype)
        pointers = [torch.empty(1, dtype=getattr(torch, x.dtype.name)) for x in (*arrays, *out_shape)]
        names = kernel.arg_names[: len(pointers)]
        assert [*kernel.arg_names[len(names) :]] == [*constants]
        arguments = dict(zip(names, pointers, strict=True)) | constants
        found.append(Launch(kernel, grid, arguments, num_warps, num_stages))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    jax.clear_caches()  # or what was traced before is not traced again
    monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
    monkeypatch.setattr(jax_triton, "refusal", lambda *_: None)
    monkeypatch.setattr(jax_triton_calls, "triton_call", record)
    yield found
    jax.clear_caches()


def trace(tokens, hidden, vocab, dtype, *, bias=False, **options):
    shapes = [(tokens, hidden), (vocab, hidden), (tokens,), *[(vocab,)] * bias]
    dtypes = [dtype, dtype, jnp.int32, *[dtype] * bias]
    f = partial(linear_cross_entropy, backend="triton", **options)
    f = jax.value_and_grad(f, argnums=(0, 1, *[3] * bias), has_aux="return_stats" in options)
    jax.eval_shape(f, *(jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)))


@pytest.mark.parametrize(
    ("capability", "device", "dtype", "options"),
    [
        ("8.6", "NVIDIA A10", "float16", {}),  # with less shared memory than an A100
        ("9.0", "NVIDIA H100", "bfloat16", {"bias": True} | EVERYTHING),
    ],
    ids=lambda x: "everything" if x and isinstance(x, dict) else str(x),
)
def test_kernels_compile(launched, monkeypatch, capability, device, dtype, options):
    gpu = type("Gpu", (), {"compute_capability": capability, "device_kind": device, "core_count": 100})()
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    trace(4096, *MODELS["llama3.1-8b"], dtype, **options)
    assert {x.grid for x in launched} == {(100,)}
    compiled = compile_all(launched, int(float(capability) * 10))
    assert {x.kernel for x in compiled} == ENTRIES
    for x in compiled:
        assert x.shared <= SHARED[capability], (x.kernel, x.constants, x.shared)
        assert ("wgmma.mma_async" if capability == "9.0" else "mma.sync") in x.ptx
        # Operands are loaded 16 bytes at a time.
        assert "cp.async.cg.shared.global" in x.ptx, x.kernel
        wanted = [name for name in ("offset_sum", "moment", "inner", "even", "bias") if x.constants.get(name)]
        assert x.stack <= (512 if wanted else 64), (x.kernel, x.constants, x.stack)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("platform", "dtype", "layout", "strategy", "capability", "installed", "reason"),
    [
        ("cpu", "bfloat16", "vh", "auto", "9.0", True, "NVIDIA GPUs, not on 'cpu'"),
        ("gpu", "float32", "vh", "auto", "9.0", True, "rounded to tf32"),
        ("gpu", "bfloat16", "hv", "auto", "9.0", True, "weight_layout='vh', not for 'hv'"),
        ("gpu", "bfloat16", "vh", "stash", "9.0", True, "'recompute' only"),
        ("gpu", "bfloat16", "vh", "auto", "9.0", False, r"jax-triton is not installed; pip install 'onchip\[jax-t"),
        ("gpu", "bfloat16", "vh", "auto", "7.5", True, "8.0 or later; this is 7.5"),
        ("gpu", "bfloat16", "vh", "auto", "gfx942", True, "8.0 or later; this is gfx942"),
        ("gpu", "bfloat16", "vh", "auto", "8.0", True, None),
        ("gpu", "float16", "vh", "recompute", "12.0", True, None),
    ],
)
def test_refusals(monkeypatch, platform, dtype, layout, strategy, capability, installed, reason):
    monkeypatch.setattr(jax_triton, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(jax_triton, "_capability", lambda: capability)
    said = jax_triton.refusal(Problem(8, 31, 1001, dtype, device="cuda"), platform, layout, strategy)
    if reason is None:
        assert said is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(said)
