"""The benchmark of fp8_linear on a device: small real runs, and its check of results past 2**31 elements."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from onchip.bench import harness, report
from onchip.ops.fp8_linear import cases
from onchip.ops.fp8_linear.bench import LINEAR, PRODUCTS, QUANTIZED_BEFORE, SCALED_MM
from onchip.ops.fp8_linear.bench import TORCH as benchmark

pytestmark = pytest.mark.gpu


def test_a_run(monkeypatch):
    monkeypatch.setattr(benchmark, "CASES", {"small": cases.Fp8LinearCase("small", 512, 768, 640)})
    found = harness.run_cases(
        "fp8_linear", benchmark, cases=["small"], implementations=benchmark.IMPLEMENTATIONS, device="cuda",
        dtype="bfloat16", repeats=2, date="2026-01-01", console=Console(file=StringIO()),
    )  # fmt: skip
    assert [row for row in found.rows if not row.ok] == []
    assert {n.impl for n in found.not_run} <= {"onchip dequantize", "torchao blockwise"}, found.not_run
    ran = {(row.mode, report.short_name(row.impl)) for row in found.rows}
    for mode in benchmark.MODES:
        beside = SCALED_MM if mode in PRODUCTS else LINEAR
        assert {(mode, name) for name in ("onchip auto", "onchip scaled_mm", "onchip triton", beside)} <= ran
    assert {(mode, QUANTIZED_BEFORE) for mode in ("forward", "forward+backward")} <= ran
    assert all((row.floor_ms is None) == (row.mode in PRODUCTS) for row in found.rows)


def test_the_gate_sees_the_end_of_a_result_of_more_than_2_to_31_elements():
    problem = benchmark.make_problem(cases.Fp8LinearCase("wide", 32768, 65792, 256), "cuda", "bfloat16")
    reference = benchmark.reference(problem)
    with torch.no_grad():
        out = torch.nn.functional.linear(problem.x, problem.weight)
        ((error, bound),) = benchmark.check(reference, "forward", [out]).values()
        assert error < bound / 5
        out[-32:] = 0
        ((error, bound),) = benchmark.check(reference, "forward", [out]).values()
        assert error > bound
        out[0, 0] = torch.nan
        ((error, _),) = benchmark.check(reference, "forward", [out]).values()
        assert error != error
