"""JAX's backend 'triton' without a GPU: what XLA is told, what is launched, machine code for GPUs, and refusals.

jax_kernels_interpreted.py shows, under Triton's interpreter, that results are right.
"""

import re
import subprocess
import tempfile
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P
from triton.backends.nvidia.compiler import get_ptxas

from launched import recorded
from onchip.jax import TopK, cross_entropy, jsd, linear_cross_entropy, linear_log_probs, log_probs
from onchip.kernels.triton import jax_front, jax_listed, launch
from onchip.kernels.triton.fill import fill_zeros
from onchip.torch import linear_cross_entropy as of_torch

T, H, V, BF16 = 300, 512, 2000, jnp.bfloat16
LIKE = jax.ShapeDtypeStruct((T, H), BF16), jax.ShapeDtypeStruct((V, H), BF16), jax.ShapeDtypeStruct((T,), jnp.int32)
LOGITS = jax.ShapeDtypeStruct((T, V), BF16)


class Told:
    """In the place of what JAX for CUDA makes calls with."""

    def __init__(self, *told):
        self.told = told

    def to_proto(self, *_):
        return repr(self.told).encode()


TOLD = SimpleNamespace(
    TritonKernel=lambda *x: x,
    TritonKernelCall=Told,
    create_array_parameter=lambda *x: x,
    create_scalar_parameter=lambda *x: x,
)


@pytest.fixture
def gpu():
    """Stands for a GPU of this compute capability."""
    with ExitStack() as stack:

        def of(capability, *, compiles=False):
            shared = {80: 166912, 89: 101376, 100: 232448}[capability]
            patches = [
                mock.patch.object(jax_listed, "gpu_triton", TOLD),
                mock.patch.object(jax_front, "gpu", return_value=(capability, 108, shared)),
                mock.patch.object(jax_front, "refusal", return_value=None),
            ]
            if not compiles:
                patches += [
                    mock.patch.object(jax_listed, "compile_jobs", list),
                    mock.patch.object(jax_listed, "told", lambda launch, *_: repr(launch.kernel).encode()),
                    mock.patch.object(jax_listed, "stack", return_value=0),
                ]
            _forget()
            for x in patches:
                stack.enter_context(x)

        yield of
    _forget()


def _forget():
    jax_listed.listed.cache_clear()
    jax.clear_caches()  # of the same functions


def lowered(function, *like, argnums=(0, 1)):
    step = jax.jit(jax.value_and_grad(function, argnums=argnums))
    return step.trace(*like).lower(lowering_platforms=("cuda",))


def test_what_is_launched_is_what_pytorch_launches(gpu):
    gpu(80)
    seen = []

    def told(launched, *_):
        seen.append((launched.kernel.__name__, "x".join(map(str, launched.grid))))
        return b""

    with mock.patch.object(jax_listed, "told", told):
        lowered(lambda h, w, y: linear_cross_entropy(h, w, y, backend="triton"), *LIKE)
    given = {
        "hidden": torch.empty(T, H, dtype=torch.bfloat16, device="meta", requires_grad=True),
        "weight": torch.empty(V, H, dtype=torch.bfloat16, device="meta", requires_grad=True),
        "target": torch.empty(T, dtype=torch.int64, device="meta"),
    }
    ampere = launch.Device(80, 108, 166912)
    with mock.patch("launched.H100", ampere):
        lines = recorded(of_torch, given, given | {"backend": "triton"})
    theirs = [re.match(r"(\w+) (?:again )?([\dx]+),", x) for x in lines]
    assert [x for x in seen if x[0] != "fill_zeros"] == [x.groups() for x in theirs if x]


def test_the_same_call_is_the_same_text(gpu):
    """Wherever PyTorch's tensors are: XLA finds what another process has compiled."""
    texts, others = set(), []
    for n in range(3):
        gpu(80)
        others.append([torch.empty(1, device="meta") for _ in range(99 * n)][::2])
        texts.add(lowered(lambda z, y: cross_entropy(z, y, backend="triton"), LOGITS, LIKE[2], argnums=0).as_text())
    assert len(texts) == 1


def test_memory_is_written_in_place(gpu):
    gpu(80)
    text = lowered(lambda h, w, y: linear_cross_entropy(h, w, y, backend="triton"), *LIKE).as_text()
    calls = [x for x in text.splitlines() if f"@{jax_listed.TARGET}" in x]
    assert len(calls) == 14
    assert all("output_operand_alias" in x for x in calls)


@pytest.mark.parametrize("tracked", [True, False])
def test_inside_of_shard_map(gpu, tracked):
    gpu(80)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(h, w, y):
        def own(h, w, y):
            return jax.lax.pmean(linear_cross_entropy(h, w, y, backend="triton"), "d")

        specs = P("d"), P(), P("d")
        return jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=tracked)(h, w, y)

    assert jax_listed.TARGET in lowered(loss, *LIKE).as_text()


@pytest.mark.parametrize("capability", [100, *(pytest.param(x, marks=pytest.mark.slow) for x in (80, 89))])
def test_machine_code_for_gpus_that_are_not_there(gpu, capability):
    """The kernels that work on rows of logits, which compile fast."""
    gpu(capability, compiles=True)
    codes, of_arrays = [], jax_listed.of_arrays

    def kept(*x):
        codes.append(of_arrays(*x))
        return codes[-1]

    with mock.patch.object(jax_listed, "of_arrays", kept):
        lowered(lambda z, y: cross_entropy(z, y, backend="triton"), LOGITS, LIKE[2], argnums=(0,))
    assert codes
    for code in codes:
        assert f".target sm_{capability}" in code
        with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
            file.write(code)
            file.flush()
            arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
            subprocess.run([get_ptxas(capability).path, f"-arch={arch}", file.name, "-o", "/dev/null"], check=True)


CODE = """.visible .entry f(
	.param .u64 .ptr .global .align 1 f_param_0,
	.param .u32 f_param_1,
	.param .u64 .ptr .global .align 1 f_param_2,
	.param .u64 .ptr .global .align 1 f_param_3,
	.param .u64 .ptr .global .align 1 f_param_4
)
{
	ld.param.b64 	%rd1, [f_param_0];
	ld.param.b32 	%r1, [f_param_1];
	ld.param.b64 	%rd2, [f_param_2];
}
"""


def test_an_argument_may_begin_inside_of_an_array():
    made = jax_listed.of_arrays("f", CODE, [(1, 0), None, (0, 48)], 2)
    head = re.findall(r"\.param \.(\w+).* (f_\w+)", made)
    assert head == [("u64", "f_array_0"), ("u64", "f_array_1"), ("u32", "f_param_1"), ("u64", "f_param_3"),
                    ("u64", "f_param_4")]  # fmt: skip
    assert "ld.param.b64 \t%rd1, [f_array_1];\n\tld.param.b32" in made
    assert "ld.param.b64 \t%rd2, [f_array_0];\n\tadd.s64 \t%rd2, %rd2, 48;" in made


def test_an_address_that_is_read_in_an_unknown_way():
    code = CODE.replace("ld.param.b64 \t%rd2, [f_param_2]", "ld.param.v2.b64 {%rd2, %rd3}, [f_param_2]")
    with pytest.raises(AssertionError, match="f reads the address of parameter 2 in an unknown way"):
        jax_listed.of_arrays("f", code, [(1, 0), None, (0, 48)], 2)


def test_pointers_that_16_divides_are_told():
    memory = torch.empty(64, device="meta")
    given = {"out": memory[2:], "N": 3, "BLOCK": 16}
    asked = [jax_listed.job(launch.Launch(fill_zeros, (1,), given | {"out": x}), 80) for x in (memory[4:], memory[2:])]
    assert [x.source.attrs[0,] for x in asked] == [[["tt.divisibility", 16]], []]
    assert asked[0].source.signature == {"out": "*fp32", "N": "i32", "BLOCK": "constexpr"}


# ------------------------------------------------------------------------------------------------------- wrong calls


def ones(*like):
    return [jnp.ones(x.shape, x.dtype) for x in like]


def test_on_the_cpu():
    with pytest.raises(
        ValueError, match="linear_cross_entropy: backend 'triton' can't run this call: it runs on NVIDIA"
    ):
        linear_cross_entropy(*ones(*LIKE), backend="triton")


def test_what_is_to_be_installed(monkeypatch):
    monkeypatch.setattr(jax_front, "platform", lambda: "gpu")
    monkeypatch.setattr(jax_front, "find_spec", lambda name: None)
    reason = r"torch and triton are not installed: pip install 'onchip\[jax-triton\]'"
    with pytest.raises(ValueError, match=f"log_probs: backend 'triton' can't run this call: {reason}"):
        log_probs(*ones(LOGITS, LIKE[2]), backend="triton")
    with pytest.warns(UserWarning, match=f"cross_entropy: it runs in plain JAX on this GPU, without kernels: {reason}"):
        cross_entropy(*ones(LOGITS, LIKE[2]))


def test_auto_takes_the_kernels_where_there_are_no_others(gpu, monkeypatch):
    gpu(89)
    monkeypatch.setattr(jax_front, "platform", lambda: "gpu")
    text = lowered(lambda h, w, y: linear_log_probs(h, w, y).sum(), *LIKE).as_text()
    assert jax_listed.TARGET in text
    known = TopK(jnp.zeros((T, 1), jnp.int32), jnp.full((T, 1), -2.0), "log_probs", "tail")
    text = lowered(lambda z: jsd(z, teacher_topk=known), LOGITS, argnums=0).as_text()
    assert jax_listed.TARGET in text
    with pytest.raises(ValueError, match="hidden has H"):  # as ever
        linear_log_probs(jnp.ones((T, 3)), *ones(*LIKE[1:]))
    message = "it runs in plain JAX on this GPU, without kernels: backend 'triton' needs to know softcap"
    with pytest.warns(UserWarning, match=message):
        jax.jit(lambda c: linear_cross_entropy(*ones(*LIKE), softcap=c)).lower(30.0)


def test_a_number_that_is_traced(gpu):
    gpu(80)
    with pytest.raises(ValueError, match="linear_cross_entropy: backend 'triton' needs to know softcap; pass a number"):
        jax.jit(lambda c: linear_cross_entropy(*ones(*LIKE), softcap=c, backend="triton"))(30.0)


def test_a_split_vocabulary(gpu):
    gpu(80)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(h, w, y):
        return linear_cross_entropy(h, w, y, axis_name="d", backend="triton")

    split = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=P())
    with pytest.raises(ValueError, match="backend 'triton' can't take a split vocabulary; pass backend='auto'"):
        split(*ones(*LIKE))


def test_several_devices_outside_of_shard_map(monkeypatch):
    monkeypatch.setattr(jax_front, "platform", lambda: "gpu")
    monkeypatch.setattr(jax_front, "gpu", lambda: (80, 108, 166912))
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"with several devices it runs only inside of jax\.shard_map"):
        linear_cross_entropy(*ones(*LIKE), backend="triton")
