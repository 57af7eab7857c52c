"""linear_log_probs on the 'mosaic_gpu' backend without a GPU: with plain stand-ins for its kernels, and lowered for
CUDA."""

from dataclasses import replace

import pytest

import plain_kernels
from onchip.ops.linear_log_probs import jax_op
from onchip.ops.linear_log_probs.cases import LogProbsCase
from onchip.ops.linear_log_probs.checks import CHECKER
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.memory import MosaicPlan
from shared import assert_within_bounds

# With 128 tokens kept in the gradient's memory, of 384 positions; the last tile of the vocabulary isn't full.
LONG = LogProbsCase("long", 500, 128, 2112, zipf=True, ignored=0.3)
KEPT = MosaicPlan("stash", 512, kept_in_gradient=128, chunk=256, kept_in_scratch=128)
ALL_IN_SCRATCH = MosaicPlan("stash", 512, chunk=2304, kept_in_scratch=512)
AGAIN = MosaicPlan("recompute", 512, chunk=512)


@pytest.fixture
def on_the_cpu(monkeypatch):
    plain_kernels.stand_in(monkeypatch)
    yield
    plain_kernels.forget()


@pytest.fixture
def as_on_hopper(monkeypatch):
    monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
    monkeypatch.setattr(mosaic_op, "refusal", lambda *_: None)
    plain_kernels.forget()  # plans of other tests
    yield
    plain_kernels.forget()


def assert_right(case, dtype="bfloat16", **how):
    assert_within_bounds(CHECKER.check_case(case, dtype, backend="mosaic_gpu", **how))


@pytest.mark.parametrize(
    ("plan", "dtype", "layout", "entropy", "changes"),
    [
        (KEPT, "bfloat16", "vh", False, {}),
        (KEPT, "bfloat16", "hv", True, {"logit_std": 3.0, "token_temperature": True}),
        (KEPT, "float16", "hv", False, {"options": {"softcap": 5.0}, "logit_std": 3.0}),
        (ALL_IN_SCRATCH, "bfloat16", "vh", True, {"logit_std": 30.0}),
        (AGAIN, "float16", "vh", True, {"options": {"softcap": 5.0}, "bias": True}),
        (AGAIN, "bfloat16", "hv", True, {"ids": 3, "ignored_ids": 0.2, "token_temperature": True}),
        (AGAIN, "float16", "vh", False, {"ids": 3, "ignored_ids": 0.2, "target_prob": 0.999}),
        (KEPT, "bfloat16", "vh", True, {"target_prob": 0.999}),
        (KEPT, "bfloat16", "vh", True, {"ignored": 1.0}),
    ],
    ids=str,
)
def test_values(plan, dtype, layout, entropy, changes, on_the_cpu, monkeypatch):
    monkeypatch.setattr(mosaic_op, "plan", lambda p, *_: plan if p.any_grad else MosaicPlan("forward", 256))
    assert_right(replace(LONG, **changes), dtype, weight_layout=layout, entropy=entropy)


def test_of_its_own_plans(on_the_cpu):
    for entropy in (False, True):
        assert_right(replace(LONG, ids=int(entropy)), entropy=entropy)
