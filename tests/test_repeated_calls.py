"""Several calls in a row, which must not depend on earlier ones: repeated_calls.py has the scenarios, every_loss.py the
checks for every loss.
"""

import ast
import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fake_cuda
import onchip
import packed_launches
import repeated_calls
from every_loss import assert_equal, gradients, refused_after_failures
from onchip.frontend import torch_prepared
from onchip.frontend.torch_builder import ALIGNED, Builder
from onchip.kernels.triton.packed import Changing
from onchip.torch import MoE, cross_entropy, grouped_matmul, linear_cross_entropy

# ------------------------------------------------------------------------------------------------- several in a row


@fake_cuda.possible
def test_on_a_gpu_that_is_not_there():
    said = fake_cuda.run(repeated_calls.__file__, *repeated_calls.SCENARIOS)
    assert said.split() == [*repeated_calls.SCENARIOS]


@fake_cuda.possible
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prepared_launches_are_those_of_triton(slow):
    ops = [x for x in packed_launches.OPS if (x in packed_launches.SLOW) == slow]
    said = [line.split() for line in fake_cuda.run(packed_launches.__file__, *ops).splitlines()]
    assert [op for op, _ in said] == ops
    assert all(int(compared) > 1 for _, compared in said)


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", repeated_calls.SCENARIOS)
def test_on_the_gpu(scenario):
    repeated_calls.SCENARIOS[scenario]("cuda")


# ------------------------------------------------------------------------------------------------- the default dtype

_MAKERS = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "linspace", "eye",
           "empty_strided", "scalar_tensor"}  # fmt: skip
# What calls do; the rest are programs of their own.
_FOLDERS = ("collectives", "fp8", "frontend", "groups", "kernels", "ops", "vocab")


@pytest.mark.parametrize("refused", [False, True])
def test_what_takes_a_call_down_is_gone_with_it(refused):
    """It knows the call's results, whose graph would live on: its nodes keep tensors, and the streams they began on."""
    x = torch.ones(8)
    with Builder([x]) as told:
        made = torch.zeros(8 + ALIGNED)
        made = made[-made.data_ptr() % ALIGNED // 4 :][:8]
        told.allocate(made)
        assert not told.refused
        told.zero(made)
        given = Changing(
            [(x, 0), (made, 1)],
            [(SimpleNamespace(base=made, shape=made.shape), SimpleNamespace(put=None, word=None))],
            [],
        )
        told.launch(SimpleNamespace(given=given, words=None, stream=None, send=None))
        told.derive(lambda address: (address, 8, None), [x], made, (8,))
        if refused:
            told.refuse("a reason")
    prepared = told.finish([made])
    assert isinstance(prepared, str) == refused
    alive = weakref.ref(told)
    gc.disable()
    try:
        del told
        assert alive() is None
    finally:
        gc.enable()


def test_every_allocation_names_its_dtype_and_device():
    """Neither is torch.set_default_dtype's nor torch.set_default_device's to choose."""
    root = Path(onchip.__file__).parent
    for path in (x for folder in _FOLDERS for x in (root / folder).rglob("*.py") if x.name != "cases.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in _MAKERS and ast.unparse(node.func.value) == "torch":
                named = {x.arg for x in node.keywords}
                assert {"dtype", "device"} <= named, f"{path}:{node.lineno}: {ast.unparse(node)}"


def _grouped(device):
    g = torch.Generator(device).manual_seed(0)

    def leaf(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float32, device=device).to(torch.bfloat16).requires_grad_()

    x, weight = leaf(6, 128), leaf(3, 128, 128)
    sizes = torch.tensor([2, 0, 4], dtype=torch.int64, device=device)
    return x, weight, partial(grouped_matmul, x, weight, sizes, activation=None)


def _of_groups(device):
    x, weight, call = _grouped(device)
    out = call()
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, weight])]


def _of_experts(device):
    torch.manual_seed(0)
    layer = MoE(128, 64, num_experts=4, top_k=2, scoring="sigmoid", correction_bias=True, dtype=torch.float32)
    layer = layer.to(device)
    x = torch.rand(2, 5, 128, dtype=torch.float32).to(device).requires_grad_()
    y, stats = layer(x, return_stats=True)
    layer.update_correction_bias(stats.counts)
    parts = [x for x in stats if isinstance(x, torch.Tensor)]
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)
    return [y, *parts, *(g for g in grads if g is not None)]


def _same_by_default(step, times):
    expected = step()
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for _ in range(times):
                made = step()
                assert [x.dtype for x in made] == [x.dtype for x in expected]
                assert_equal(made, expected)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("step", [_of_groups, _of_experts])
def test_the_default_dtype_decides_on_nothing(step):
    _same_by_default(partial(step, "cpu"), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [_of_groups, _of_experts])
def test_the_default_dtype_decides_on_nothing_on_the_gpu(step):
    _same_by_default(partial(step, "cuda"), repeated_calls.TIMES)


# ------------------------------------------------------------------------------- a backward that was interrupted


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _assert_used_once(op, make):
    """`make()` gives an output, what its gradient is asked for, and memory of the caller's that takes a gradient."""

    def backward(given, mode, **options):
        made, leaves, added = given
        with mode:
            found = gradients(made, leaves, torch.full_like(made, 0.5), allow_unused=True, **options)
        return [x for x in (*found, added) if x is not None]

    def forward():
        torch_prepared.forget()  # each is a first call: a prepared one has fewer operators
        return make()

    assert refused_after_failures(op, forward, backward, kept=(False,))


def _adding_groups(device):
    x, weight, call = _grouped(device)
    added = torch.zeros(weight.shape, dtype=torch.float32, device=device)
    return call(weight_grad_out=added), [x, weight], added


def test_groups_are_added_once():
    _assert_used_once("grouped_matmul", partial(_adding_groups, "cpu"))


@pytest.mark.gpu
def test_groups_are_added_once_on_the_gpu():
    for _ in range(2):
        _assert_used_once("grouped_matmul", partial(_adding_groups, "cuda"))


def test_shards_are_used_up_once(group):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=g).requires_grad_() for n in (5, 40))
    labels = torch.randint(40, (5,), generator=g)
    sharded = {"vocab_group": group, "vocab_size": 40}

    def adding():
        added = torch.zeros(40, 16)
        loss = linear_cross_entropy(hidden, weight, labels, weight_grad_out=added, **sharded)
        return loss, [hidden, weight], added

    def in_place():
        logits = hidden.detach().requires_grad_() @ weight.detach().T
        return cross_entropy(logits, labels, inplace_backward=True, **sharded), [logits], None

    _assert_used_once("linear_cross_entropy", adding)
    _assert_used_once("cross_entropy", in_place)
