"""What every public function of the PyTorch front end refuses, in the op's words and with the remedy."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from onchip.torch import (
    TopK,
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    quantize_activation,
)

X, W, B, IDS = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16), torch.zeros(4, dtype=torch.int64)
Z, ONES = torch.randn(4, 16), torch.ones(4)
TENSORS = {
    cross_entropy: {"logits": Z, "target": IDS, "token_weight": ONES, "temperature": ONES, "normalizer": ONES.sum(),
                    "class_weight": B.abs()},
    linear_cross_entropy: {
        "hidden": X, "weight": W, "target": IDS, "bias": B, "token_weight": ONES, "temperature": ONES,
        "normalizer": ONES.sum(), "class_weight": B.abs(), "weight_grad_out": torch.zeros(16, 8),
    },
    linear_log_probs: {"hidden": X, "weight": W, "ids": IDS, "bias": B, "temperature": ONES},
    linear_jsd: {
        "student_hidden": X, "student_weight": W, "student_bias": B, "teacher_hidden": X, "teacher_weight": W,
        "teacher_bias": B, "target": IDS, "token_weight": ONES, "normalizer": ONES.sum(),
    },
    jsd: {"student_logits": Z, "teacher_logits": Z, "target": IDS, "token_weight": ONES},
    fp8_linear: {"x": X, "weight": W, "bias": B, "weight_grad_out": torch.zeros(16, 8)},
    quantize_activation: {"x": X},
    grouped_matmul: {
        "x": X, "weight": W[None], "group_sizes": torch.tensor([3]), "bias": B[None], "row_scale": ONES, "rows": IDS,
        "weight_grad_out": torch.zeros(1, 16, 8),
    },
}  # fmt: skip
EACH = [(f, name) for f, tensors in TENSORS.items() for name in tensors]
by_name = {"ids": lambda x: x if isinstance(x, str) else getattr(x, "__name__", None)}
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
DOORS = {linear_cross_entropy: "lm_loss", linear_log_probs: "lm_log_probs", linear_jsd: "lm_jsd"}
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
@pytest.mark.parametrize(("function", "name"), EACH, **by_name)
def test_a_tensor_of_another_kind(function, name, bad):
    make, remedy = BAD[bad]
    wrong = make(TENSORS[function][name].clone())
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**TENSORS[function] | {name: wrong})
    said = str(caught.value)
    assert re.match(rf"{function.__name__}: {name} ", said), said
    if not (bad == "got Linear" and name in ("temperature", "normalizer")):  # a number, they say
        if bad == "got Linear" and name.endswith("weight") and function in DOORS:
            remedy = f"pass the head, or its model, to {DOORS[function]}"
        elif bad == "got Linear" and not name.endswith(("weight", "bias")):
            remedy = "pass a tensor that it returned"
        assert remedy.format(name) in said, said
        assert name == "weight_grad_out" or bad.strip() in said, said


@pytest.mark.parametrize("part", ["indices", "values"])
def test_a_teachers_topk_of_another_kind(part):
    parts = {"indices": IDS[:, None], "values": ONES[:, None]}
    topk = TopK(**parts | {part: parts[part].numpy()}, kind="log_probs", rest="tail")
    remedy = re.escape(f"jsd: teacher_topk.{part} is a numpy.ndarray; pass torch.from_numpy(teacher_topk.{part})")
    with pytest.raises(TypeError, match=remedy):
        jsd(Z, teacher_topk=topk)


def test_the_largest_integers_are_fine():
    for value in (2**63 - 1, -(2**63)):
        assert linear_cross_entropy(X, W, IDS, ignore_index=value, scratch_bytes=2**63 - 1).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", TENSORS, **by_name)
def test_triton_asks_for_a_gpu_first(function, dtype):
    tensors = {k: x.to(dtype) if x.is_floating_point() and x.ndim > 1 else x for k, x in TENSORS[function].items()}
    tensors = {k: x for k, x in tensors.items() if k not in ("bias", "student_bias", "teacher_bias", "weight_grad_out")}
    with pytest.raises(ValueError, match="backend 'triton' can't run this call: it runs on CUDA tensors, not on 'cpu'"):
        function(**tensors, backend="triton")
    if function is jsd:
        topk = TopK(IDS[:, None], ONES[:, None], "log_probs", "tail")
        with pytest.raises(ValueError, match="it runs on CUDA tensors, not on 'cpu'"):
            jsd(Z, teacher_topk=topk, backend="triton")
