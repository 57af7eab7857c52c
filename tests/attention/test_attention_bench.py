"""What `onchip bench` and `onchip plan` say about attention."""

import pytest
import torch

from onchip.attention.mosaic import problem as mosaic
from onchip.attention.problem import AttentionProblem, scratch_parts
from onchip.attention.triton.problem import memory_parts
from onchip.masks import Documents, Window
from onchip.ops.attention import bench
from onchip.ops.attention.bench import JAX, TORCH
from onchip.ops.attention.cases import SUITES, AttentionBenchCase
from onchip.plan import plan
from onchip.torch import attention

SMALL = [
    AttentionBenchCase("causal", "causal", 24, 4, 2, 8, 8),
    AttentionBenchCase("mixed", "mixed", 40, 4, 2, 8, 6, length=9),
    AttentionBenchCase("tree", "tree", 24, 4, 2, 8, 8, batch=2),
    AttentionBenchCase("sinks", "window", 24, 4, 2, 8, 8, 1, True, 5),
    AttentionBenchCase("images", "images", 24, 4, 2, 8, 8),
    AttentionBenchCase("full", "full", 24, 4, 2, 8, 8, batch=2),
    AttentionBenchCase("documents", "documents", 24, 4, 2, 8, 8, length=7),
]
SDPA = ("torch SDPA", "torch SDPA, mask as a matrix")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_steps_of_pytorch(case):
    problem = TORCH.make_problem(case, "cpu", "float32")
    reference = TORCH.reference(problem)
    by_name = {impl.name: impl for impl in TORCH.IMPLEMENTATIONS}
    for name in ("onchip auto", *SDPA):
        impl = by_name[name]
        if name in SDPA and (case.sinks or (name == "torch SDPA" and case.mask not in ("causal", "full"))):
            with pytest.raises(ValueError, match=r"no sinks|its mask is causal or full"):
                TORCH.steps(problem, impl)
            continue
        for mode, step in TORCH.steps(problem, impl).items():
            made = step()
            assert all(error <= bound for error, bound in TORCH.check(reference, mode, made).values())
            wrong = [2 * x for x in made]
            assert all(error > 0.1 for error, _ in TORCH.check(reference, mode, wrong).values())
    assert TORCH.floor(problem, "forward")()[0].isfinite().all()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention(case, monkeypatch):
    """Its steps, not compiled; it has no gradients on the CPU, nor a log-sum-exp in what is compiled there."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = TORCH.make_problem(case, "cpu", "float32")
    (flex,) = (impl for impl in TORCH.IMPLEMENTATIONS if impl.name == "torch flex_attention")
    made = TORCH.steps(problem, flex)["forward"]()
    assert all(error <= bound for error, bound in TORCH.check(TORCH.reference(problem), "forward", made).values())


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_varlen_attn(case, monkeypatch):
    """It gets the documents and the window that the mask says."""

    def alone(q, k, v, ends, of_keys, longest, of_keys_longest, *, window_size, **_):
        lengths = ends.diff()
        assert ends.dtype == torch.int32
        assert ends is of_keys
        assert longest == of_keys_longest == lengths.max()
        left, right = (None if size < 0 else size for size in window_size)
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return attention(q, k, v, Documents(ids) & Window(left, right))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", alone)
    problem = TORCH.make_problem(case, "cpu", "float32")
    (varlen,) = (impl for impl in TORCH.IMPLEMENTATIONS if impl.name == "torch varlen_attn")
    if case.sinks or case.mask in ("tree", "images"):
        with pytest.raises(ValueError, match=r"no sinks|its mask is"):
            TORCH.steps(problem, varlen)
        return
    reference = TORCH.reference(problem)
    for mode, step in TORCH.steps(problem, varlen).items():
        assert all(error <= bound for error, bound in TORCH.check(reference, mode, step()).values())


def test_what_is_checked_of_large_cases(monkeypatch):
    """Fewer groups of heads, the last among them, by blocks of queries that take their range of keys."""
    problem = TORCH.make_problem(SMALL[1], "cpu", "float32")
    whole = TORCH.reference(problem)
    monkeypatch.setattr(bench, "_ROWS", 7)
    monkeypatch.setattr(bench, "_CHECKED", 1)
    part = TORCH.reference(problem)
    for name, heads in (("out", (2, 3)), ("grad_q", (2, 3)), ("grad_k", (1,)), ("grad_v", (1,))):
        assert tuple(part[name][0]) == heads
        for h in heads:
            torch.testing.assert_close(part[name][0][h], whole[name][0][h])


def test_a_rounded_result_is_right():
    """Probabilities in bfloat16, and out in bfloat16: what every kernel rounds."""
    problem = TORCH.make_problem(AttentionBenchCase("causal", "causal", 256, 2, 1, 64, 64), "cpu", "bfloat16")
    (plain,) = (impl for impl in TORCH.IMPLEMENTATIONS if impl.name == "torch SDPA")
    made = TORCH.steps(problem, plain)["forward+backward"]()
    found = TORCH.check(TORCH.reference(problem), "forward+backward", made)
    assert all(error <= bound for error, bound in found.values()), found
    assert all(bound < 0.01 for _, bound in found.values())


def test_steps_of_jax():
    problem = JAX.make_problem(SMALL[0], "cpu", "float32")
    reference = JAX.reference(problem)
    own, plain, cudnn, *_ = JAX.IMPLEMENTATIONS
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
    assert made.row("default").memory_parts == memory_parts(p, 1, backward=True, sinks=False, fused=True)
    assert plan("attention", **sizes, gpu="a100").backend == "triton"
    other_values = {**sizes, "head_size": 192, "value_size": 128}
    of_values = plan("attention", **other_values)
    assert (of_values.backend, of_values.sizes) == ("triton", other_values)
    assert plan("attention", **other_values, gpu="a100").backend == "plain"
    widest = plan("attention", **{**sizes, "head_size": 256}).row("default").memory_parts
    assert widest == memory_parts(p._replace(size=256, value_size=256), 1, backward=True, sinks=False)
    for size, parts in ((64, 1), (128, 2)):
        small, of_small = {**sizes, "head_size": size}, p._replace(size=size, value_size=size)
        two, one = (memory_parts(of_small, 1, backward=True, sinks=False, fused=x) for x in (False, True))
        few, most = sum(two.values()), sum(one.values())
        assert most - few == parts * 4 * 32 * 4096 * 64 + 4 * (4 + parts * 32 * 64)
        made = plan("attention", **small, scratch=(few, most - 1, most))
        assert [row.memory_parts for row in made.rows] == [one, two, two, one]
        assert plan("attention", **small).row("smallest").memory_parts == two
        assert plan("attention", **small, gpu="a100").row("default").memory_parts == two
    small, of_small = {**sizes, "head_size": 64}, p._replace(size=64, value_size=64)
    two, one = (mosaic.memory_parts(of_small, backward=True, fused=x) for x in (False, True))
    few, most = sum(two.values()), sum(one.values())
    assert most - few == 4 * 32 * 4096 * 64 + 4 * 32 * 64 + 4 * (1 + 32 * 64)
    made = plan("attention", **small, framework="jax", scratch=(few - 1, few, most - 1, most))
    assert [row.memory_parts if row.fits else None for row in made.rows] == [one, None, two, two, one]
    assert made.backend == "mosaic_gpu"
    of_values = plan("attention", **sizes, value_size=64, backend="plain").row("default")
    narrow = p._replace(value_size=64)
    assert of_values.memory_parts == scratch_parts(narrow, 2, of_values.chunk["queries"], backward=True, softcap=False)
    for gpu, dtype, size in (
        ("a100", "bfloat16", 160),
        ("a100", "float32", 128),
        ("h100", "float32", 128),
        ("h100", "bfloat16", 264),
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
