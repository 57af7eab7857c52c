"""The Triton backend without a GPU: interpreted, against the oracle (interpreted_llp.py), and compiled for Hopper."""

from functools import partial

import interpreted_llp
import pytest
import torch

from interpreter import interpreted
from linear_cross_entropy.ahead_of_time import PRODUCTS, compile_all, recording, turned, weights_read
from onchip.ops.linear_log_probs.torch_op import linear_log_probs
from onchip.vocab.triton import memory as head_spec

outcomes, test_interpreted = interpreted(interpreted_llp)


# ------------------------------------------------------------------------------------------------ ahead of time

# Compute capability, and bytes of shared memory that a block may use: H100, A100.
HOPPER, AMPERE = (90, 232448), (80, 166912)
# What linear_cross_entropy doesn't launch.
OWN = {"spread_log_probs", "entropy_gradient", "write_entries"}
MIXED = head_spec.TritonConfig(300, 512, 256, stashed=128, overflow=128)
OPTIONS = {
    "one id": {"plan": MIXED},
    "several": {"plan": MIXED, "ids": 4, "bias": True},
    "entropy": {"plan": MIXED, "entropy": True},
    "everything": {"entropy": True, "ids": 4, "bias": True, "softcap": 5.0, "temperature": torch.ones(300)},
}


def launches(device, *, plan=None, ids=None, bias=False, dtype=torch.bfloat16, weight=None, **options):
    """What the op launches, forward and backward."""

    def leaf(*shape):
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    with recording(device, plan=plan) as found:
        y = torch.zeros((300,) if ids is None else (300, ids), dtype=torch.int64)
        b = leaf(1000) if bias else None
        w = leaf(1000, 512) if weight is None else weight
        out = linear_log_probs(leaf(300, 512), w, y, b, backend="triton", lse=True, **options)
        sum(x.sum() for x in out[:3] if x is not None).backward()
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_hopper(options):
    """What differs from linear_cross_entropy's launches, whose tests have the rest."""
    own = {"gather_tokens", "gradient_tiles", "position_terms", "add_targets", "finish_hidden", *OWN}
    found = [x for x in launches(HOPPER, **OPTIONS[options]) if x.kernel.__name__ in own]
    for k in compile_all(found, HOPPER[0]):
        assert k.shared <= HOPPER[1], (k.kernel, k.constants, k.shared)
        # The entropy's epilogue needs the logits twice, where the product has taken most registers.
        wanted = [k.constants.get(name) for name in ("inner_scale", "entropy_scale")]
        assert k.stack <= (512 if any(wanted) else 16 if k.constants.get("bias") else 0), (k.kernel, k.stack)
        if k.kernel in PRODUCTS:
            assert "wgmma.mma_async" in k.ptx
            assert "cp.async.bulk.tensor" in k.ptx


def test_a_weight_whose_columns_lie_in_rows_is_read_as_it_lies():
    weight = turned(1000, 512)
    assert weights_read(launches(HOPPER, weight=weight, **OPTIONS["several"])) == {weight.data_ptr()}


def test_ampere():
    found = launches(AMPERE, dtype=torch.float16, **OPTIONS["entropy"])
    (compiled,) = compile_all([x for x in found if x.kernel.__name__ == "gradient_tiles"], AMPERE[0])
    assert compiled.shared <= AMPERE[1]
    assert "mma.sync" in compiled.ptx


def test_the_options_reach_every_kernel():
    made = {x.kernel.__name__ for options in OPTIONS.values() for x in launches(HOPPER, **options)}
    assert made >= OWN


# ----------------------------------------------------------------------------------------------------------- plans


def test_auto_takes_the_kernels_where_they_can_run():
    x = torch.randn(4, 8)
    with recording(HOPPER) as found:
        linear_log_probs(x, x, torch.zeros(4, dtype=torch.int64))
    assert found


def test_it_says_why_it_refuses(monkeypatch):
    h = torch.zeros(2, 16)
    call = partial(linear_log_probs, h, h, torch.zeros(2, dtype=torch.int64), backend="triton")
    with pytest.raises(ValueError, match="'triton' can't run this call: it runs on CUDA tensors, not on 'cpu'"):
        call()
    monkeypatch.setattr("onchip.vocab.triton.plan.device_refusal", lambda *_: None)
    with pytest.raises(ValueError, match="'triton' can't run this call: its products are of bfloat16 or float16"):
        call()
