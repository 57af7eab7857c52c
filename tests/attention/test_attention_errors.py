"""Every way to call attention wrongly in PyTorch."""

import re
from unittest import mock

import numpy as np
import pytest
import torch

from onchip.attention.problem import AttentionOptions, AttentionProblem
from onchip.attention.triton import op
from onchip.kernels.triton.launch import Device
from onchip.masks import Blocked, Blocks, Causal, Chunked, Documents, Full, Intervals, PrefixLM, Tree, Window
from onchip.torch import attention

Q, K, V = (torch.randn(2, 6, h, 4) for h in (4, 2, 2))
IDS = torch.tensor([0, 0, 1, 1, 1, 2])
WRONG = {
    "a list": (TypeError, {"q": [1.0]}, "q must be a torch.Tensor; got list"),
    "NumPy": (TypeError, {"k": K.numpy()}, "k is a numpy.ndarray; pass torch.from_numpy(k)"),
    "sparse": (TypeError, {"v": V.to_sparse()}, "v is sparse_coo"),
    "integers": (TypeError, {"q": Q.long()}, "q must be float32"),
    "complex": (TypeError, {"sinks": torch.zeros(4, dtype=torch.complex64)}, "sinks must be"),
    "two dtypes": (TypeError, {"k": K.bfloat16()}, "k is bfloat16"),
    "two devices": (ValueError, {"v": V.to("meta")}, "v is on meta"),
    "dimensions": (ValueError, {"q": Q[0, 0]}, "q must be [B, T, H, D], or without B in all of q, k and v"),
    "no batch in one": (ValueError, {"k": K[0]}, "k must be [B, T, H, D], or without B"),
    "batches": (ValueError, {"k": K[:1]}, "q, k and v have 2, 1 and 2 sequences"),
    "tokens": (ValueError, {"v": V[:, :5]}, "k has 6 tokens and 2 heads but v has 5 and 2"),
    "heads": (ValueError, {"q": Q[:, :, :3]}, "q has 3 heads, which isn't a multiple of the 2 heads of k and v"),
    "no heads": (ValueError, {"q": Q[:, :, :0]}, "heads and their sizes must be 1 or more"),
    "sizes": (ValueError, {"q": Q[..., :3]}, "q has head size 3 but k has 4"),
    "sinks": (ValueError, {"sinks": torch.zeros(2)}, "sinks must be [4], a number for each head of q"),
    "scale": (TypeError, {"scale": "1"}, "scale must be"),
    "kernels": (ValueError, {"backend": "triton"}, "backend 'triton' can't run this call: it runs on CUDA tensors"),
    "budget": (ValueError, {"scratch_bytes": 100}, "scratch_bytes=100 is too small; the call needs at least"),
    "budget's unit": (ValueError, {"scratch_bytes": "1GB"}, "did you mean '1GiB'"),
    "no mask": (TypeError, {"mask": None}, "mask must be one of Full, Causal"),
    "a matrix": (
        TypeError,
        {"mask": torch.ones(6, 6, dtype=torch.bool)},
        "got Tensor; for an attention_mask [B, T] of 1 and 0 pass Documents(attention_mask, padding=0) & Causal()",
    ),
    "a class": (TypeError, {"mask": Causal}, "got type; pass one of it, as Causal()"),
    "an empty window": (ValueError, {"mask": Window(-1)}, "Window(left=-1, right=0) sees nothing; pass None, not -1"),
    "offset": (TypeError, {"mask": Causal(1.0)}, "Causal.offset must be an int; got float"),
    "left": (TypeError, {"mask": Window(True)}, "Window.left must be an int; got bool"),
    "size": (ValueError, {"mask": Chunked(0)}, "Chunked.size must be above 0; got 0"),
    "within": (TypeError, {"mask": Chunked(4, within=Causal())}, "Chunked.within must be a Documents; got Causal"),
    "ids": (TypeError, {"mask": Documents([0, 1])}, "Documents.ids must be an array of q's framework; got list"),
    "ids of NumPy": (TypeError, {"mask": Documents(np.zeros(6, int))}, "Documents.ids must be an array of q's fr"),
    "float ids": (TypeError, {"mask": Documents(IDS.float())}, "Documents.ids must be integers; got float32"),
    "too few ids": (ValueError, {"mask": Documents(IDS[:5])}, "Documents.ids must be [2, 6] or [6]; got shape [1, 5]"),
    "ids of a batch": (
        ValueError,
        {"mask": Blocks(IDS.expand(3, 6))},
        "Blocks.ids must be [2, 6] or [6]; got shape [3",
    ),
    "ids elsewhere": (ValueError, {"mask": Documents(IDS.to("meta"))}, "the mask is on meta but q is on cpu"),
    "ids that come back": (ValueError, {"mask": Causal() & Documents(IDS % 2)}, "Documents.ids has 0 in two places"),
    "documents of others": (ValueError, {"mask": Documents(IDS), "k": K[:, :5], "v": V[:, :5]}, "pass Intervals"),
    "lengths": (ValueError, {"mask": PrefixLM(torch.zeros(3, dtype=torch.int32))}, "PrefixLM.lengths must be [2]"),
    "stop": (ValueError, {"mask": Tree(IDS[:3])}, "Tree.stop must be [2, 6] or [6]"),
    "start": (ValueError, {"mask": Intervals(IDS[:2], IDS)}, "Intervals.start must be [2, 6] or [6]"),
    "blocks": (
        ValueError,
        {"mask": Blocked(torch.ones(2, 2, dtype=torch.bool), 2)},
        "Blocked.blocks must be [2, 3, 3]",
    ),
    "blocks of numbers": (
        TypeError,
        {"mask": Blocked(torch.ones(3, 3), 2)},
        "Blocked.blocks must be bool; got float32",
    ),
    "blocks twice": (
        ValueError,
        {"mask": Blocked(torch.ones(3, 3, dtype=torch.bool), 2) & Blocked(torch.ones(2, 2, dtype=torch.bool), 3)},
        "only one Blocked can be combined",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_raises(name):
    error, changes, message = WRONG[name]
    with pytest.raises(error, match=f"attention: .*{re.escape(message)}"):
        attention(**{"q": Q, "k": K, "v": V, **changes})


def test_the_remedy_for_an_attention_mask_is_what_it_says():
    attention_mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    out = attention(Q, K, V, Documents(attention_mask, padding=0) & Causal())
    for row, kept in enumerate(attention_mask.bool()):
        alone = attention(Q[row, kept], K[row, kept], V[row, kept], Causal())
        torch.testing.assert_close(out[row, kept], alone)


@pytest.mark.parametrize(
    ("capability", "size", "value_size", "message"),
    [
        (90, 192, 128, None),
        (90, 136, 8, None),
        (90, 256, 256, None),
        (90, 64, 136, None),
        (90, 264, 128, "its head sizes are multiples of 8 up to 256, not 264; pass backend='plain'"),
        (90, 140, 128, "its head sizes are multiples of 8 up to 256, not 140; pad them with zeros, or pass"),
        (90, 192, 512, "its value sizes are multiples of 8 up to 256, not 512; pass backend='plain'"),
        (80, 128, 128, None),
        (80, 136, 128, "without the Gluon kernels for Hopper its heads have at most 128 numbers, not 136"),
        (80, 64, 256, "without the Gluon kernels for Hopper its heads have at most 128 numbers, not 256"),
        (100, 192, 128, "without the Gluon kernels"),
    ],
)
def test_heads_that_kernels_take(capability, size, value_size, message):
    given = AttentionProblem(1, 64, 64, 4, 2, size, value_size), AttentionOptions(), 0.1
    of_gpu = {
        "describe": Device(capability, 132, 232448), "has_gluon": capability == 90, "device_refusal": None
    }  # fmt: skip
    with mock.patch.multiple(op, **{name: mock.Mock(return_value=x) for name, x in of_gpu.items()}):
        found = op.refusal(torch.device("cuda"), torch.bfloat16, *given, blocked=False, backward=True, sinks=False)
    assert found is None if message is None else message in found


def test_and_takes_masks_alone():
    with pytest.raises(TypeError):
        Causal() & 3


def test_the_least_budget_that_a_message_names_is_enough():
    for grad in (False, True):
        q = Q.clone().requires_grad_(grad)
        with pytest.raises(ValueError, match="at least") as raised:
            attention(q, K, V, scratch_bytes=1)
        least = int(str(raised.value).split()[-2])
        torch.testing.assert_close(attention(q, K, V, scratch_bytes=least), attention(q, K, V))
        with pytest.raises(ValueError, match="too small"):
            attention(q, K, V, scratch_bytes=least - 1)


def test_derivatives_of_second_order_and_transforms():
    q = Q.clone().requires_grad_()
    (g,) = torch.autograd.grad(attention(q, K, V, Full()).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention"):
        g.sum().backward()
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match=r"attention: torch\.func transforms"):
            transform(lambda q: attention(q, K[0], V[0]).sum())(Q[0] if transform is torch.func.grad else Q)
