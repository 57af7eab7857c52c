"""The benchmark of fp8_linear: a small real run, its gate, what doesn't fit, its summary, a peer's stand-in."""

import dataclasses
import json
import math
import sys
from io import StringIO
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from typer.testing import CliRunner

from onchip import cli
from onchip.bench import harness, measure, plots
from onchip.bench.ops import fp8_linear as benchmark
from onchip.bench.ops import fp8_linear_peers as peers
from onchip.bench.ops import fp8_linear_sizes as bench_spec
from onchip.bench.run import run_bench
from onchip.ops.fp8_linear import cases

# Ragged sizes, with more rows than are checked at the end of each result.
SMALL = cases.Case("small", 200, 136, 150)
LAYER = ["forward", "forward+backward"]


def implementation(name):
    (found,) = (impl for impl in benchmark.IMPLEMENTATIONS if impl.name == name)
    return found


def small_problem(dtype="float32"):
    return benchmark.make_problem(SMALL, "cpu", dtype)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(benchmark, "CASES", {**benchmark.CASES, "small": SMALL})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads would wait for each other most of the time
    yield
    torch.set_num_threads(threads)


def outcome(*implementations, dtype="float32"):
    """Of a run without files."""
    return harness.run_cases(
        "fp8_linear", benchmark, measure, cases=["small"], implementations=implementations, device="cpu", dtype=dtype,
        repeats=1, console=Console(file=StringIO()),
    )  # fmt: skip


def test_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("onchip.bench.environment._busy_cores", lambda: 0.0)
    document = run_bench(
        "fp8_linear", benchmark.__name__, cases=["small"], device="cpu", dtype="bfloat16", repeats=1, impls=None,
        out=tmp_path, console=Console(file=StringIO()),
    )  # fmt: skip
    assert {n["impl"] for n in document["not_run"]} == {
        "onchip scaled_mm", "onchip triton", peers.QUANTIZED_BEFORE.name, "torchao blockwise", peers.SCALED_MM,
    }  # fmt: skip
    rows = {(r["mode"], plots.short_name(r["impl"])): r for r in document["rows"]}
    own = [(mode, name) for mode in benchmark.MODES for name in ("onchip auto", "onchip dequantize")]
    assert set(rows) == {*own, *((mode, peers.LINEAR) for mode in LAYER)}
    assert all(r["ok"] and r["error_bound"] == 10 ** (-28 / 20) for r in rows.values())
    for (mode, name), row in rows.items():
        assert list(row["errors"]) == list(benchmark.RETURNED[mode])
        # 28.65 dB is 0.037; of few numbers it is a little more.
        assert all((error > 0.02) == (name != peers.LINEAR) for error in row["errors"].values())
        assert (row["floor_ms"] is not None) == (mode in LAYER)
    assert rows["forward", "onchip auto"]["config"] == {"backend": "dequantize"}
    assert document["summary"] == []  # of layers that are large enough


def wrong_steps(problem, spoil):
    return {mode: lambda s=step: spoil(s()) for mode, step in implementation(peers.LINEAR).steps(problem).items()}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda made: [x * 1.05 for x in made],
        lambda made: [x.index_fill(0, torch.tensor([len(x) - 1]), 0.0) * 1.03 for x in made],
        lambda made: [x.index_fill(1, torch.tensor([x.shape[1] - 1]), math.nan) for x in made],
    ],
)
def test_a_wrong_peer_gets_no_time(spoil):
    def steps(problem, peer):
        return wrong_steps(problem, spoil)

    wrong = benchmark.Implementation(implementation(peers.LINEAR).peer, steps)
    found = outcome(wrong, implementation("onchip dequantize"))
    assert [(r.ok, r.median_ms) for r in found.rows if r.impl.startswith(peers.LINEAR)] == [(False, None)] * 2
    assert found.not_run == []
    assert sum(r.ok for r in found.rows) == len(benchmark.MODES)


def test_a_result_of_another_shape_is_refused():
    problem = small_problem()
    reference = benchmark.reference(problem)
    with pytest.raises(ValueError, match=r"out has shape \[136, 200\] where \[200, 136\] is right"):
        benchmark.check(reference, "forward", [problem.grad_out.T])
    with pytest.raises(ValueError, match="shorter"):
        benchmark.check(reference, "forward+backward", [problem.grad_out])


def test_the_reference_is_the_unquantised_layer():
    problem = small_problem()
    x, w, g = (t.detach().double() for t in (problem.x, problem.weight, problem.grad_out))
    reference = benchmark.reference(problem)
    for name, exact in {"out": x @ w.T, "grad_x": g @ w, "grad_weight": g.T @ x}.items():
        rows = reference.where[name]
        assert 64 < len(rows) <= 128
        assert rows[-64:].tolist() == list(range(len(exact) - 64, len(exact)))
        torch.testing.assert_close(reference.values[name].double(), exact[rows], rtol=1e-4, atol=1e-5)


def test_chunks_of_the_reference_change_nothing(monkeypatch):
    problem = small_problem()
    whole = benchmark.reference(problem)
    monkeypatch.setattr(bench_spec, "CHUNK", 50 * 150)  # rows of 150 numbers, 50 at a time
    for name, value in benchmark.reference(problem).values.items():
        torch.testing.assert_close(value, whole.values[name], rtol=1e-5, atol=1e-5)


def test_tf32_is_off_for_the_reference_alone():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with benchmark._no_tf32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_every_step_quantises_the_weight_once_or_it_was_before(monkeypatch):
    made = []
    quantize = benchmark.torch_op.torch_quantize.quantize_weight

    def counted(w, scale, **wanted):
        made.append(wanted)
        return quantize(w, scale, **wanted)

    monkeypatch.setattr(benchmark.torch_op.torch_quantize, "quantize_weight", counted)
    problem = small_problem()
    steps = implementation("onchip dequantize").steps(problem)
    for mode, both in zip(LAYER, (False, True), strict=True):
        made.clear()
        for _ in range(3):
            steps[mode]()
        assert made == [{"rows": True, "transposed": both}] * 3
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))  # where copies aren't checked
    before = implementation(peers.QUANTIZED_BEFORE.name).steps(problem)
    assert tuple(before) == tuple(LAYER)
    made.clear()
    for mode, step in before.items():
        assert all(torch.equal(p, q) for p, q in zip(step(), steps[mode](), strict=True))
    assert len(made) == 2


def test_a_problem_that_does_not_fit_is_reported_with_the_bytes(monkeypatch):
    needed = benchmark.needed_bytes(SMALL, "float32")
    monkeypatch.setattr(benchmark, "_device_bytes", lambda device: needed - 1)
    found = outcome(implementation("onchip dequantize"))
    reason = f"the problem was not made: MemoryError: it needs {needed} bytes of device memory; {needed - 1} are there"
    assert found.not_run == [harness.NotRun("onchip dequantize", "small", None, reason)]
    assert found.rows == []
    monkeypatch.setattr(benchmark, "_device_bytes", lambda device: needed)
    assert outcome(implementation("onchip dequantize")).not_run == []


def test_the_suite_fits_an_80_gb_card():
    largest = max(cases.MODEL_CASES, key=lambda case: benchmark.needed_bytes(case, "bfloat16"))
    assert largest.name == "llama3.1-405b-gate-up-4"
    # Inputs and results, 23 GB, as much in FP8 for the products and for a step, and the weight's copies once more.
    assert 45e9 < benchmark.needed_bytes(largest, "bfloat16") < 60e9


def test_suite_and_defaults():
    assert len(benchmark.SUITES["primus"]) == 84
    assert set(benchmark.SUITES["primus"]) <= set(benchmark.CASES)
    assert all(name in benchmark.CASES for names in benchmark.DEFAULT_CASES.values() for name in names)
    assert len(benchmark.DEFAULT_CASES["cuda"]) == len(cases.MODELS)
    case = benchmark.CASES["qwen2.5-7b-down-4"]
    assert (case.m, case.n, case.k) == (32768, 3584, 18944)


def test_command_says_which_suites_there_are():
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", "fp8_linear", "--suite", "spec"])
    assert result.exit_code == 2
    assert "got 'spec', and there is: primus" in result.stderr


def test_summary():
    def row(case, mode, impl, ms):
        return {"case": case, "dtype": "bfloat16", "mode": mode, "impl": f"{impl} 1.0", "median_ms": ms}

    times = {"llama3.1-8b-qkv-1": (8.0, 2.0), "llama3.1-8b-out-1": (9.0, 9.0), "qwen2.5-7b-qkv-1": (1.0, 9.0)}
    rows = [
        row(case, "forward+backward", impl, ms)
        for case, both in times.items()
        for impl, ms in zip((peers.LINEAR, "onchip auto"), both, strict=True)
    ]
    rows += [
        row("llama3.1-8b-out-1", "wgrad product", peers.SCALED_MM, 3.0),
        row("llama3.1-8b-out-1", "wgrad product", "onchip auto", 2.0),
        row("llama3.1-8b-out-2", "forward+backward", "onchip auto", None),  # a wrong one
        row("llama3.1-8b-qkv-1", "forward+backward", "onchip auto", 1.0) | {"dtype": "float32"},  # beside nothing
    ]
    layer, product = benchmark.summary(rows)
    assert layer == {  # qwen2.5-7b's K is 3584
        "mode": "forward+backward", "dtype": "bfloat16", "implementation": "onchip auto 1.0",
        "times_faster_than": "torch nn.Linear 1.0", "cases": 2, "least_N_and_K": 4096,
        "geometric_mean": pytest.approx(2.0), "least": 1.0, "least_case": "llama3.1-8b-out-1",
    }  # fmt: skip
    assert (product["mode"], product["geometric_mean"], product["cases"]) == ("wgrad product", pytest.approx(1.5), 1)
    json.dumps(benchmark.summary(rows), allow_nan=False)


# ------------------------------------------------------------------------- stand-ins with the interfaces of the peers


class Float8BlockwiseLinear(torch.nn.Linear):
    @classmethod
    def from_float(cls, mod):
        assert mod.bias is None
        with torch.device("meta"):
            made = cls(mod.in_features, mod.out_features, bias=False)
        made.weight = mod.weight
        return made

    def forward(self, x):
        return F.linear(x, self.weight)


@pytest.fixture
def torchao(monkeypatch):
    parts = ["torchao", "prototype", "blockwise_fp8_training", "linear"]
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    sys.modules[".".join(parts)].Float8BlockwiseLinear = Float8BlockwiseLinear


def test_torchao_is_called_as_its_interface_wants(torchao):
    problem = small_problem("bfloat16")
    reference = benchmark.reference(problem)
    for mode, step in implementation("torchao blockwise").steps(problem).items():
        assert all(error <= bound for error, bound in benchmark.check(reference, mode, step()).values())


def test_torchao_is_not_asked_for_more_elements_than_it_counts(torchao):
    step = peers._torchao()
    x, weight = torch.empty(32768, 128, device="meta"), torch.nn.Parameter(torch.empty(65536, 128, device="meta"))
    with pytest.raises(ValueError, match="its kernels count elements in 32 bits, and the output has 2147483648"):
        step(x, weight)
    assert step(x[:-128], weight).shape == (32640, 65536)


def test_peers_say_why_they_do_not_run(monkeypatch):
    torchao = implementation("torchao blockwise")
    assert torchao.unavailable("cpu", "bfloat16") == "it runs on CUDA devices only"
    assert "not float32" in torchao.unavailable("cuda", "float32")
    monkeypatch.setattr("onchip.bench.peers.not_installed", lambda package: None)
    monkeypatch.setattr(peers, "not_installed", lambda package: "missing")
    assert torchao.unavailable("cuda", "bfloat16") == "torchao is not installed; pip install torchao"
    assert "timed on the CPU" in implementation("onchip dequantize").unavailable("cuda", "bfloat16")
    assert implementation("onchip dequantize").unavailable("cpu", "bfloat16") is None
    assert "CUDA tensors" in implementation(peers.SCALED_MM).unavailable("cpu", "bfloat16")


def test_a_product_is_that_of_the_backend_and_of_operands_made_before(monkeypatch):
    problem = dataclasses.replace(small_problem())
    assert [o.by_block for o in problem.operands.values()] == [True, True, False]
    assert problem.operands is problem.operands
    alone = benchmark.Implementation(
        dataclasses.replace(
            implementation(peers.SCALED_MM).peer, load=lambda: benchmark.torch_op._backend("dequantize").product
        ),
        benchmark._peer_steps,
    )
    steps = alone.steps(problem)
    assert tuple(steps) == benchmark.PRODUCTS
    reference = benchmark.reference(problem)
    for mode, step in steps.items():
        assert all(error <= bound for error, bound in benchmark.check(reference, mode, step()).values())
