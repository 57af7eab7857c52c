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
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from jax.sharding import PartitionSpec as P
from triton.backends.nvidia.compiler import get_ptxas

from launched import recorded
from onchip.jax import TopK, cross_entropy, grouped_matmul, jsd, linear_cross_entropy, linear_log_probs, log_probs
from onchip.kernels.triton import jax_front, jax_listed, launch
from onchip.torch import linear_cross_entropy as of_torch
from onchip.vocab.triton import setup

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
                    mock.patch.object(jax_listed, "resources", return_value=(0, 0)),
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
    assert seen == [x.groups() for x in theirs if x]


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


def test_a_part_of_each_sequence_is_a_slice(gpu):
    """Not what a list of places picks, which would be a constant as large."""
    gpu(80)
    hidden, ids = jax.ShapeDtypeStruct((2, T, H), BF16), jax.ShapeDtypeStruct((2, T, 8), jnp.int32)

    def loss(h, w, i, p):
        return linear_cross_entropy(h, w, TopK(i, p, "probs", "truncated"), shift=True, backend="triton")

    text = lowered(loss, hidden, LIKE[1], ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32)).as_text()
    assert max(map(len, text.splitlines())) < 10_000


def test_what_one_matrix_spans_is_one_array(gpu):
    """Two chunks of tokens, one after the other, have their pieces in the same place, behind what is kept."""
    gpu(80)
    made, aligned = [], setup.aligned

    def noted(like, shape, dtype, others=()):
        made.append((aligned(like, shape, dtype, others), [x for x in others if x.numel()]))
        return made[-1][0]

    like = [jax.ShapeDtypeStruct(x, BF16) for x in ((8192, 4096), (128256, 4096))]
    with mock.patch.object(setup, "aligned", noted):
        labels = jax.ShapeDtypeStruct((8192,), jnp.int32)
        lowered(lambda h, w, y: linear_cross_entropy(h, w, y, backend="triton"), *like, labels)
    gradient, digits, first, other = (x for x, _ in made)
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x, _ in made}
    assert [*storages.values()] == [other.data_ptr() + other.nbytes]
    assert gradient.data_ptr() == 0
    assert digits.data_ptr() == gradient.nbytes
    assert first.data_ptr() == other.data_ptr() == digits.data_ptr() + digits.nbytes


def test_no_tokens(gpu):
    gpu(80)
    z, y = (jax.ShapeDtypeStruct((0, *x.shape[1:]), x.dtype) for x in (LOGITS, LIKE[2]))
    lowered(lambda z, y: cross_entropy(z, y, backend="triton"), z, y, argnums=0)
    x, w = jax.ShapeDtypeStruct((0, 64), BF16), jax.ShapeDtypeStruct((3, 32, 64), BF16)
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    lowered(lambda x, w, n: grouped_matmul(x, w, n, backend="triton").astype(jnp.float32).sum(), x, w, sizes)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:],
        lambda x: x[1:, :-2],
        lambda x: x[2:, 1:, 3:],
        lambda x: x[:, 2, 1::2],
        lambda x: x[1, :, 4],
        lambda x: x.permute(2, 0, 1),
        lambda x: x[1:3].flatten(1).T,
        lambda x: x[3:],
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
def test_views(view, dtype):
    whole = torch.arange(-100, 140).view(4, 6, 10).to(dtype)
    memory, part = jax_listed.XlaMemory(), view(whole)
    memory.write(whole, whole.numpy())
    assert torch.equal(torch.from_numpy(np.array(memory.read(part))).to(dtype), part)
    memory.write(part, 7 - part.numpy())
    part.copy_(7 - part)
    assert torch.equal(torch.from_numpy(np.array(memory.read(whole))).to(dtype), whole)
    (flat,) = memory.values()
    assert np.array_equal(np.asarray(flat).view(whole.numpy().dtype), whole.numpy().reshape(-1))


def test_labels_without_a_sign():
    x, memory = torch.empty(2, dtype=torch.int64, device="meta"), jax_listed.XlaMemory()
    memory.write(x, jnp.array([3, 2**32 - 100], jnp.uint32))
    (flat,) = memory.values()
    assert np.asarray(flat).view(np.int64).tolist() == [3, 2**32 - 100]


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


@triton.jit(do_not_specialize=["N"])
def put(out, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, i, mask=i < N)


def test_pointers_that_16_divides_are_told():
    memory = torch.empty(64, device="meta")
    asked = [launch.Launch(put, (1,), {"out": x, "N": 3, "BLOCK": 16}).job(80) for x in (memory[4:], memory[2:])]
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
