"""What every public function refuses, in both frameworks: in the op's words and with the remedy."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

import onchip.jax
import onchip.torch
from onchip.torch import jsd

rng = np.random.default_rng(0)
X, W, B, Z = (rng.standard_normal(shape, np.float32) for shape in ((4, 8), (16, 8), 16, (4, 16)))
IDS, ONES, SUM = np.zeros(4, np.int32), np.ones(4, np.float32), np.ones((), np.float32)
NUMBERS = {"token_weight": ONES, "temperature": ONES, "normalizer": SUM, "class_weight": np.abs(B)}
HARD = {"target": IDS, "token_weight": ONES, "normalizer": SUM}
HEAD = {"hidden": X, "weight": W, "bias": B}
# Arguments by function; those that JAX doesn't have, and those that it takes as numbers too.
ARRAYS = {
    "cross_entropy": {"logits": Z, "target": IDS} | NUMBERS,
    "linear_cross_entropy": HEAD | {"target": IDS, "weight_grad_out": 0 * W} | NUMBERS,
    "log_probs": {"logits": Z, "ids": IDS, "temperature": ONES},
    "linear_log_probs": HEAD | {"ids": IDS, "temperature": ONES},
    "linear_jsd": {f"{who}_{name}": x for who in ("student", "teacher") for name, x in HEAD.items()} | HARD,
    "jsd": {"student_logits": Z, "teacher_logits": Z} | HARD,
    "fp8_linear": {"x": X, "weight": W, "bias": B, "weight_grad_out": 0 * W},
    "quantize_activation": {"x": X},
    "grouped_matmul": {
        "x": X, "weight": W[None], "group_sizes": np.array([3], np.int32), "bias": B[None], "row_scale": ONES,
        "rows": IDS, "weight_grad_out": 0 * W[None],
    },
}  # fmt: skip
OF_PYTORCH, OF_NUMBERS = ("weight_grad_out", "quantize_activation"), ("temperature", "normalizer")
EACH = [(f, name) for f, arrays in ARRAYS.items() for name in arrays]


def in_torch(function, *without):
    return {name: torch.from_numpy(x.copy()) for name, x in ARRAYS[function].items() if name not in without}


def in_jax(function):
    return {name: jnp.asarray(x) for name, x in ARRAYS[function].items() if name not in (*OF_PYTORCH, *OF_NUMBERS)}


BAD = {
    "a numpy.ndarray": (lambda x: x.numpy(), "pass torch.from_numpy({})"),
    "sparse_coo": (torch.Tensor.to_sparse, "pass {}.to_dense()"),
    "sparse_csr": (lambda x: x.reshape(-1, 1).to_sparse_csr(), "pass {}.to_dense()"),
    "_mkldnn": (lambda x: x.float().reshape(-1).to_mkldnn(), "pass {}.to_dense()"),
    "a nested tensor": (lambda x: torch.nested.nested_tensor([x, x]), "pass torch.cat({}.unbind())"),
    "a nested tensor ": (lambda x: torch.nested.nested_tensor([x.view(-1)], layout=torch.jagged), "pass torch.cat"),
    "a DTensor": (lambda x: DTensor.from_local(x, MESH[0], [Replicate()], run_check=False), "pass {}.full_tensor()"),
    "got Linear": (lambda _: torch.nn.Linear(8, 16), "pass a parameter of it, as {}.weight"),
    "quint8": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8), "pass {}.dequantize()"),
    "got complex64": (lambda x: x + 1j, ""),
    "negates": (torch._neg_view, "pass {}.resolve_neg()"),
}  # fmt: skip
BAD_IN_JAX = {
    "Tensor": (lambda x: torch.from_numpy(np.array(x)), "got Tensor; pass jax.numpy.from_dlpack({})"),
    "Param": (lambda x: type("Param", (), {"__jax_array__": lambda self: x})(), "got Param; pass {}[...]"),  # Flax's
    "list": (lambda x: x.tolist(), "got list; pass jax.numpy.asarray({})"),
    "object": (lambda x: np.array(x, object), "{} holds Python objects; pass numbers, as by {}.astype(...)"),
}
DOORS = {"linear_cross_entropy": "lm_loss", "linear_log_probs": "lm_log_probs", "linear_jsd": "lm_jsd"}
MESH = []


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    MESH.append(init_device_mesh("cpu", (1,)))
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("function", "name"), EACH)
def test_a_tensor_of_another_kind(function, name, bad):
    make, remedy = BAD[bad]
    given = in_torch(function)
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(onchip.torch, function)(**given | {name: make(given[name])})
    said = str(caught.value)
    assert re.match(rf"{function}: {name} ", said), said
    if not (bad == "got Linear" and name in OF_NUMBERS):  # a number, they say
        if bad == "got Linear" and name.endswith("weight") and function in DOORS:
            remedy = f"pass the head, or its model, to {DOORS[function]}"
        elif bad == "got Linear" and not name.endswith(("weight", "bias")):
            remedy = "pass a tensor that it returned"
        assert remedy.format(name) in said, said
        assert name == "weight_grad_out" or bad.strip() in said, said


@pytest.mark.parametrize("bad", BAD_IN_JAX)
@pytest.mark.parametrize(("function", "name"), [x for x in EACH if not {*x} & {*OF_PYTORCH}])
def test_an_array_of_another_kind(function, name, bad):
    make, remedy = BAD_IN_JAX[bad]
    given = in_jax(function)
    expected = re.escape(remedy.format(name, name)) if name in given else f"{name} must be .*number|holds"
    with pytest.raises((TypeError, ValueError), match=rf"^{function}: .*({expected})"):
        getattr(onchip.jax, function)(**given | {name: make(given.get(name, ONES))})


@pytest.mark.parametrize("part", ["indices", "values"])
def test_a_teachers_topk_of_another_kind(part):
    parts, name = {"indices": IDS[:, None], "values": ONES[:, None]}, f"teacher_topk.{part}"
    for framework, put, wrong, remedy in (
        (
            onchip.torch,
            torch.from_numpy,
            parts[part],
            f"is a numpy.ndarray; pass torch.from_numpy({name})",
        ),
        (onchip.jax, jnp.asarray, parts[part].tolist(), f"got list; pass jax.numpy.asarray({name})"),
    ):
        given = {name: put(x) for name, x in parts.items()} | {part: wrong}
        with pytest.raises(TypeError, match=re.escape(remedy)):
            framework.jsd(put(Z), teacher_topk=framework.TopK(**given, kind="log_probs", rest="tail"))


@pytest.mark.parametrize(("framework", "put"), [(onchip.torch, torch.from_numpy), (onchip.jax, jnp.asarray)])
def test_the_largest_integers_are_fine(framework, put):
    for value in (2**63 - 1, -(2**63)):
        options = {"ignore_index": value, "scratch_bytes": 2**63 - 1}
        assert np.isfinite(float(framework.linear_cross_entropy(put(X), put(W), put(IDS), **options)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", ARRAYS)
def test_triton_asks_for_a_gpu_first(function, dtype):
    tensors = in_torch(function, "bias", "student_bias", "teacher_bias", "weight_grad_out")
    tensors = {k: x.to(dtype) if x.is_floating_point() and x.ndim > 1 else x for k, x in tensors.items()}
    refused = "backend 'triton' can't run this call: it runs on CUDA tensors, not on 'cpu'"
    with pytest.raises(ValueError, match=refused):
        getattr(onchip.torch, function)(**tensors, backend="triton")
    if function == "jsd":
        topk = onchip.torch.TopK(*map(torch.from_numpy, (IDS[:, None], ONES[:, None])), "log_probs", "tail")
        with pytest.raises(ValueError, match=refused):
            jsd(tensors["student_logits"], teacher_topk=topk, backend="triton")


@pytest.mark.parametrize("function", [name for name in ARRAYS if name not in OF_PYTORCH])
def test_mosaic_asks_for_a_gpu_first(function):
    refused = f"{function}: backend 'mosaic_gpu' can't run this call: it runs on NVIDIA GPUs, not on 'cpu'"
    with pytest.raises(ValueError, match=re.escape(refused)):
        getattr(onchip.jax, function)(**in_jax(function), backend="mosaic_gpu")
