"""The benchmark's steps return what it checks, and it notices what is wrong."""

import pytest
import torch

from onchip.bench.ops.grouped_matmul import RETURNED, TORCH
from onchip.ops.grouped_matmul.cases import MODEL_CASES


@pytest.fixture(scope="module")
def problem():
    return TORCH.make_problem(TORCH.CASES["cpu"], "cpu", "float32")


@pytest.mark.parametrize("mode", RETURNED)
def test_steps(problem, mode):
    own = TORCH.IMPLEMENTATIONS[0]
    made = TORCH.steps(problem, own)[mode]()
    errors = TORCH.check(TORCH.reference(problem), mode, made)
    assert list(errors) == list(RETURNED[mode])
    assert all(error <= bound for error, bound in errors.values())
    wrong = [x.roll(1, 0) for x in made]
    assert all(error > 0.1 for error, _ in TORCH.check(problem, mode, wrong).values())
    (floor,) = TORCH.floor(problem, mode)()[:1]
    assert torch.isfinite(floor).all()


def test_sizes_of_models():
    """All rows belong to a group; skewed groups fall off, and half of some are empty."""
    for case in MODEL_CASES:
        assert sum(case.sizes) == case.tokens
        assert len(case.sizes) == case.groups
        kind = case.name.rpartition("-")[2]
        if kind == "skewed":
            assert list(case.sizes) == sorted(case.sizes, reverse=True) or case.sizes[-1] > 0
        assert sum(size == 0 for size in case.sizes) == (case.groups // 2 if kind == "half_empty" else 0)
