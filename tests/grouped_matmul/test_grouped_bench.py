"""The benchmark's steps return what it checks, and it notices wrong results."""

import itertools

import jax
import pytest
import torch

from onchip.ops.grouped_matmul.bench import JAX, RETURNED, TORCH
from onchip.ops.grouped_matmul.cases import MODEL_CASES


@pytest.fixture(scope="module")
def problems():
    return {b.framework: b.make_problem(b.CASES["cpu"], "cpu", "float32") for b in (TORCH, JAX)}


MODES = [
    pytest.param(b, i, mode, marks=[pytest.mark.slow] * (b is JAX and i == 0 and mode != "forward+backward"))
    for b, i in ((TORCH, 0), (JAX, 0), (JAX, 1))
    for mode in b.MODES
]


@pytest.mark.parametrize(("benchmark", "number", "mode"), MODES, ids=lambda x: getattr(x, "framework", x))
def test_steps(problems, benchmark, number, mode):
    problem = problems[benchmark.framework]
    made = benchmark.steps(problem, benchmark.IMPLEMENTATIONS[number])[mode]()
    errors = benchmark.check(benchmark.reference(problem), mode, made)
    assert list(errors) == list(RETURNED[mode])
    assert all(error <= bound for error, bound in errors.values())
    wrong = [benchmark.fw.xp.roll(x, 1, 0) for x in made]
    assert all(error > 0.1 for error, _ in benchmark.check(problem, mode, wrong).values())
    (floor,) = benchmark.floor(problem, mode)()[:1]
    assert benchmark.fw.xp.isfinite(floor).all()


def test_sizes_of_models():
    """All rows belong to a group; skewed groups fall off, and half of some are empty."""
    for case in MODEL_CASES:
        assert sum(case.sizes) == case.tokens
        assert len(case.sizes) == case.groups
        kind = case.name.rpartition("-")[2]
        if kind == "skewed":
            assert list(case.sizes) == sorted(case.sizes, reverse=True) or case.sizes[-1] > 0
        assert sum(size == 0 for size in case.sizes) == (case.groups // 2 if kind == "half_empty" else 0)


def test_tokamax_is_called_as_it_wants(problems, stand_in):
    def ragged_dot(lhs, rhs, group_sizes, *, implementation):
        asked.append(implementation)
        return jax.lax.ragged_dot(lhs, rhs, group_sizes)

    asked = []
    stand_in("tokamax", {"ragged_dot": ragged_dot})
    problem = problems["jax"]
    for impl in JAX.IMPLEMENTATIONS[2:]:
        errors = JAX.check(problem, "wgrad", JAX.steps(problem, impl)["wgrad"]())
        assert all(error <= bound for error, bound in errors.values())
    assert asked == ["mosaic", "triton"]


def test_quack_is_called_as_it_wants(problems, stand_in):
    """A and B as its gemm has them: [rows, K] and [G, K, N], or [M, rows] and [rows, N] with cu_seqlens_k."""

    def gemm(a, b, *, cu_seqlens_m=None, cu_seqlens_k=None, tuned):
        asked.append(tuned)
        ends = (cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m).tolist()
        groups = [slice(*pair) for pair in itertools.pairwise(ends)]
        if cu_seqlens_m is None:
            return torch.stack([a[:, rows] @ b[rows] for rows in groups])
        return torch.cat([a[rows] @ w for rows, w in zip(groups, b, strict=True)])

    asked = []
    stand_in("quack.gemm_interface", {"gemm": gemm})
    problem = problems["torch"]
    for impl in (impl for impl in TORCH.IMPLEMENTATIONS if impl.package == "quack-kernels"):
        for mode, step in TORCH.steps(problem, impl).items():
            errors = TORCH.check(problem, mode, step())
            assert all(error <= bound for error, bound in errors.values())
    assert asked == [tuned for tuned in (True, False) for _ in range(6)]
