"""Every wrong call raises an error that says what is wrong and what to do."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from onchip.collectives.torch_ring import ProcessRing, refusal
from onchip.torch import ColumnParallelLinear, RowParallelLinear, all_gather_matmul, matmul_reduce_scatter

X, W, B = torch.randn(6, 8), torch.randn(4, 8), torch.randn(4)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("function", [all_gather_matmul, matmul_reduce_scatter], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        # shapes
        ((X, torch.randn(4, 7), None), {}, ValueError, r"x(_shard)? has K=8 but weight has K=7; weight must be \[N, K\]"),
        ((X, W[0], None), {}, ValueError, r"weight must be \[N, K\], N, K >= 1; got shape \[8\]"),
        ((X, W[:0], None), {}, ValueError, r"weight must be \[N, K\], N, K >= 1; got shape \[0, 8\]"),
        ((X[0], W, None), {}, ValueError, r"x(_shard)? must be \[T(/n)?, K\] or \[T(/n)?, ..., K\]; got shape \[8\]"),
        ((X, W, None), {"bias": X[0]}, ValueError, r"bias has shape \[8\] but weight has N=4; bias must be \[N\]"),
        # groups
        ((X, W, 0), {}, TypeError, "group must be a torch.distributed.ProcessGroup, or None for all processes; got int"),
        # options
        ((X, W, None), {"check_inputs": 1}, TypeError, "check_inputs must be True or False; got int"),
        ((X, W, None), {"backend": "nccl"}, ValueError, "backend must be one of 'auto', 'ring', 'symmetric', 'collective'; got 'nccl'"),
        ((X, W, None), {"reduce_dtype": "bf16"}, TypeError, "reduce_dtype must be a torch.dtype, or None; got str"),
        ((X, W, None), {"reduce_dtype": torch.half}, ValueError, "reduce_dtype must be None, torch.float32 or x's dtype, torch.float32; got torch.float16"),
        # kinds
        ((X.numpy(), W, None), {}, TypeError, r"x(_shard)? is a numpy.ndarray; pass torch.from_numpy\(x(_shard)?\)"),
        ((X, None, None), {}, TypeError, "weight must be a torch.Tensor; got NoneType"),
        ((X, torch.nn.Linear(8, 4), None), {}, TypeError, "weight must be a torch.Tensor; got Linear; pass a parameter of it"),
        ((X.int(), W, None), {}, TypeError, r"x(_shard)? must be float32, bfloat16, float16 or float64; got int32"),
        ((X, W.bfloat16(), None), {}, TypeError, r"x(_shard)? is float32 but weight is bfloat16; cast one of them, or run under torch.autocast"),
        ((X, W, None), {"bias": B.half()}, TypeError, r"x(_shard)? is float32 but bias is float16; cast one of them"),
        ((X, W.double(), None), {}, TypeError, r"x(_shard)? is float32 but weight is float64; cast one of them"),
        ((X, W.to("meta"), None), {}, ValueError, r"weight is on meta but x(_shard)? is on cpu; move it there"),
        ((X, W, None), {"weight_grad_out": W.bfloat16()}, TypeError, "weight_grad_out must be float32; got bfloat16"),
        ((X, W, None), {"weight_grad_out": W.T}, ValueError, r"weight_grad_out must be contiguous, of weight's shape, \[4, 8\]"),
    ],
)  # fmt: skip
def test_wrong_calls(function, arguments, options, error, message):
    with pytest.raises(error, match=f"^{function.__name__}: {message}"):
        function(*arguments, **options)


def test_what_one_of_them_has():
    with pytest.raises(TypeError, match="all_gather_matmul: keep_gathered must be True or False; got int"):
        all_gather_matmul(X, W, None, keep_gathered=1)
    with pytest.raises(TypeError, match=r"got DeviceMesh; pass mesh\.get_group"):
        all_gather_matmul(X, W, init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match=r"all_gather_matmul: torch.func transforms .* are not supported"):
        torch.func.grad(lambda x: all_gather_matmul(x, W, None).sum())(X)


def test_groups_that_have_nothing_for_a_device():
    ring = ProcessRing(dist.group.WORLD.group_name, 0, 2)
    assert refusal(ring, torch.device("cpu")) is None
    assert refusal(ring, torch.device("cuda")) == (
        "cuda tensors travel by nccl, but the group has gloo for them; create it with backend='nccl'"
    )
    assert refusal(ring, torch.device("mps")) == "it runs on cpu, cuda tensors, not on 'mps'"
    assert refusal(ring._replace(ranks=1), torch.device("cuda")) is None


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda layer: layer(0, 4, None), ValueError, "{}: in_features must be positive; got 0"),
        (lambda layer: layer(8, None, None), TypeError, "{}: out_features must be an int; got NoneType"),
        (lambda layer: layer(8, 4.0, None), TypeError, "{}: out_features must be an int; got float"),
        (lambda layer: layer(8, 4, None, bias=1), TypeError, "{}: bias must be True or False; got int"),
        (lambda layer: layer(8, 4, None, main_grad=1), TypeError, "{}: main_grad must be True or False; got int"),
        (lambda layer: layer(8, 4, None, backend="nccl"), ValueError, "{}: backend must be one of 'auto', 'collective', 'symmetric', 'ring'; got 'nccl'"),
        (lambda layer: layer(8, 4, None, reduce_dtype="bf16"), TypeError, "{}: reduce_dtype must be a torch.dtype, or None; got str"),
        (lambda layer: layer(8, 4, "tp"), TypeError, "{}: group must be a torch.distributed.ProcessGroup, or None"),
        (lambda layer: layer.from_linear(torch.nn.ReLU(), None), TypeError, "{}.from_linear: it takes a torch.nn.Linear; got ReLU"),
        (lambda layer: layer(8, 4, None, main_grad=True)(X), ValueError, "{}: main_grad=True needs weight.main_grad, a float32"),
    ],
)  # fmt: skip
def test_wrong_layers(layer, make, error, message):
    with pytest.raises(error, match="^" + message.format(layer.__name__)):
        make(layer)


def test_no_process_group():
    group = dist.group.WORLD
    dist.distributed_c10d.GroupMember.WORLD = None
    try:
        with pytest.raises(
            ValueError, match=r"all_gather_matmul: there is no process group; call torch\.distributed\.in"
        ):
            all_gather_matmul(X, W, None)
    finally:
        dist.distributed_c10d.GroupMember.WORLD = group
