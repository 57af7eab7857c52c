"""What `onchip bench` and `onchip plan` say about attention."""

import pytest

from onchip.attention.problem import AttentionProblem, scratch_parts
from onchip.attention.triton.problem import memory_parts
from onchip.ops.attention.bench import JAX, TORCH
from onchip.ops.attention.cases import SUITES, AttentionBenchCase
from onchip.plan import plan

SMALL = [
    AttentionBenchCase("causal", "causal", 24, 4, 2, 8, 8),
    AttentionBenchCase("mixed", "mixed", 40, 4, 2, 8, 6, length=9),
    AttentionBenchCase("tree", "tree", 24, 4, 2, 8, 8, batch=2),
    AttentionBenchCase("sinks", "window", 24, 4, 2, 8, 8, 1, True, 5),
    AttentionBenchCase("images", "images", 24, 4, 2, 8, 8),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_steps_of_pytorch(case):
    problem = TORCH.make_problem(case, "cpu", "float32")
    reference = TORCH.reference(problem)
    own, matrix, causal, *_ = TORCH.IMPLEMENTATIONS
    able = [own, *([] if case.sinks else [matrix]), *([causal] if case.mask == "causal" else [])]
    for impl in (own, matrix, causal):
        if impl not in able:
            with pytest.raises(ValueError, match=r"no sinks|its mask is causal"):
                TORCH.steps(problem, impl)
            continue
        for mode, step in TORCH.steps(problem, impl).items():
            made = step()
            assert all(error <= bound for error, bound in TORCH.check(reference, mode, made).values())
            wrong = [2 * x for x in made]
            assert all(error > 0.1 for error, _ in TORCH.check(reference, mode, wrong).values())
    assert TORCH.floor(problem, "forward")()[0].isfinite().all()


def test_steps_of_jax():
    problem = JAX.make_problem(SMALL[0], "cpu", "float32")
    reference = JAX.reference(problem)
    own, plain, cudnn = JAX.IMPLEMENTATIONS
    for impl in (own, plain):
        made = JAX.steps(problem, impl)["forward+backward"]()
        assert all(error <= bound for error, bound in JAX.check(reference, "forward+backward", made).values())
    with pytest.raises(ValueError, match="its mask is causal, full or a window"):
        JAX.steps(JAX.make_problem(SMALL[-1], "cpu", "float32"), cudnn)


def test_cases():
    assert {case.mask for case in SUITES["cuda"]} >= {
        "causal",
        "full",
        "window",
        "documents",
        "mixed",
        "tree",
        "images",
    }


def test_plan():
    sizes = {"tokens": 4096, "heads": 32, "key_heads": 8, "head_size": 128}
    p = AttentionProblem(1, 4096, 4096, 32, 8, 128, 128)
    made = plan("attention", **sizes)
    assert made.backend == "triton"
    assert made.sizes == sizes
    assert made.row("default").memory_parts == memory_parts(p, 1, backward=True, sinks=False)
    assert plan("attention", **sizes, gpu="a100").backend == "triton"
    for gpu, dtype, size in (
        ("a100", "bfloat16", 160),
        ("a100", "float32", 128),
        ("h100", "float32", 128),
        ("h100", "bfloat16", 160),
    ):
        other = plan("attention", **{**sizes, "head_size": size}, gpu=gpu, dtype=dtype)
        assert other.backend == "plain"
    plain = plan("attention", **sizes, backend="plain")
    row = plain.row("default")
    assert row.memory_parts == scratch_parts(p, 2, row.chunk["queries"], backward=True, softcap=False)
    assert row.ms is None
    forward = plan("attention", **sizes, backend="plain", gradients=False)
    assert forward.row("default").chunk["queries"] >= row.chunk["queries"]
    for wrong, message in (
        ({"heads": 32}, "give heads, key_heads, head_size"),
        ({"heads": 32, "key_heads": 5, "head_size": 64}, "heads is 32, but key_heads is 5, which must divide it"),
    ):
        with pytest.raises(ValueError, match=message):
            plan("attention", tokens=64, **wrong)
    with pytest.raises(ValueError, match="fp8_linear has no heads, which is for attention"):
        plan("fp8_linear", tokens=64, in_features=8, out_features=8, heads=2)
