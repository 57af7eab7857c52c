"""The benchmark of fp8_linear in JAX: a small real run, its gate, inputs, what doesn't fit, its summary."""

from dataclasses import replace
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from onchip.bench import harness, measure_jax, plots
from onchip.bench.ops import fp8_linear_jax as jax_benchmark
from onchip.bench.ops import fp8_linear_jax_peers as jax_peers
from onchip.bench.ops import fp8_linear_sizes as bench_spec
from onchip.bench.run import run_bench
from onchip.fp8 import numbers
from onchip.ops.fp8_linear import cases
from shared_jax import quick_compilation  # noqa: F401

# Ragged sizes, with more rows than are checked at the end of each result.
SMALL = cases.Case("small", 200, 136, 150)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(jax_benchmark, "CASES", {**jax_benchmark.CASES, "small": SMALL})


@pytest.fixture(scope="module")
def problem():
    return jax_benchmark.make_problem(SMALL, "cpu", "float32")


def implementation(name):
    (found,) = (impl for impl in jax_benchmark.IMPLEMENTATIONS if impl.name == name)
    return found


def test_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("onchip.bench.report.html_page", lambda document: "")
    monkeypatch.setattr("onchip.bench.environment._busy_cores", lambda: 0.0)
    document = run_bench(
        "fp8_linear", jax_benchmark.__name__, framework="jax", cases=["small"], device="cpu", dtype="bfloat16",
        repeats=1, impls=None, out=tmp_path, console=Console(file=StringIO()),
    )  # fmt: skip
    reason = "it runs on NVIDIA GPUs, not on 'cpu'"
    assert document["not_run"] == [{"impl": "onchip mosaic_gpu", "case": None, "mode": None, "reason": reason}]
    rows = {(r["mode"], plots.short_name(r["impl"])): r for r in document["rows"]}
    assert set(rows) == {(mode, name) for mode in harness.MODES for name in ("onchip xla", jax_peers.PRODUCT)}
    for (mode, name), row in rows.items():
        assert row["ok"], row
        assert row["error_bound"] == 10 ** (-28 / 20)
        assert list(row["errors"]) == list(bench_spec.LAYER[mode])
        assert all((error > 0.02) == (name == "onchip xla") for error in row["errors"].values())
        assert row["ratio_to_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])
        assert row["extra_bytes"] > 0
    assert rows["forward", "onchip xla"]["config"] == {"backend": "xla"}
    assert document["summary"] == []  # of layers that are large enough


def test_a_step_differentiates_with_the_given_gradient(problem):
    x, w, g = (np.asarray(a, np.float64) for a in (problem.x, problem.weight, problem.grad_out))
    made = implementation(jax_peers.PRODUCT).steps(problem)["forward+backward"]()
    for result, exact in zip(made, (x @ w.T, g @ w, g.T @ x), strict=True):
        np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-5)
    shapes = [a.shape for a in jax_benchmark.floor(problem, "forward+backward")()]
    assert shapes == [a.shape for a in made]
    assert [a.shape for a in jax_benchmark.floor(problem, "forward")()] == shapes[:1]


@pytest.mark.parametrize("chunk", [bench_spec.CHUNK, 50 * 150])
def test_the_reference_is_the_unquantised_layer(problem, chunk, monkeypatch):
    monkeypatch.setattr(bench_spec, "CHUNK", chunk)  # rows of 150 numbers, all or 50 at a time
    x, w, g = (np.asarray(a, np.float64) for a in (problem.x, problem.weight, problem.grad_out))
    reference = jax_benchmark.reference(problem)
    for name, exact in {"out": x @ w.T, "grad_x": g @ w, "grad_weight": g.T @ x}.items():
        rows = reference.where[name]
        assert 64 < len(rows) <= 128
        assert rows[-64:].tolist() == list(range(len(exact) - 64, len(exact)))
        np.testing.assert_allclose(reference.values[name], exact[rows], rtol=1e-4, atol=1e-5)


def test_wrong_results_are_found(problem):
    reference = jax_benchmark.reference(problem)
    right = implementation(jax_peers.PRODUCT).steps(problem)["forward+backward"]()
    for spoil in (lambda a: a * 1.05, lambda a: a.at[-9:].set(0), lambda a: a.at[:, -1].set(jnp.nan)):
        checked = jax_benchmark.check(reference, "forward+backward", [spoil(a) for a in right])
        assert not any(error <= bound for error, bound in checked.values())
    with pytest.raises(ValueError, match=r"out has shape \[136, 200\] where \[200, 136\] is right"):
        jax_benchmark.check(reference, "forward", [problem.grad_out.T])
    with pytest.raises(ValueError, match="shorter"):
        jax_benchmark.check(reference, "forward+backward", right[:1])


def test_inputs_are_normal_and_of_many_values():
    """JAX draws 128 values, none beyond 2.7, where it is asked for bfloat16."""
    made = jax_benchmark.make_problem(replace(SMALL, m=2048), "cpu", "bfloat16")
    assert {a.dtype for a in vars(made).values()} == {jnp.dtype("bfloat16")}
    for array, std in ((made.x, 1), (made.weight, SMALL.k**-0.5), (made.grad_out, 1)):
        numbers = np.asarray(array, np.float32)
        assert numbers.std() == pytest.approx(std, rel=0.03)
        assert np.abs(numbers).max() > 3.2 * std
        assert len(np.unique(numbers)) > 500
    assert len(np.unique(np.asarray(made.x[:, 0], np.float32))) > 500  # blocks of rows are different ones


def test_a_problem_that_does_not_fit_is_reported_with_the_bytes(monkeypatch):
    needed = jax_benchmark.needed_bytes(SMALL, "float32")
    p = numbers.Problem(SMALL.m, SMALL.n, SMALL.k, "float32")
    in_fp8 = (
        numbers.quantized_bytes(SMALL.m, SMALL.k)
        + numbers.quantized_bytes(SMALL.k, SMALL.m)
        + numbers.gradient_bytes(p)
    )
    assert needed == 8 * (200 * 136 + 200 * 150 + 136 * 150) + in_fp8 + numbers.weight_bytes(p)
    monkeypatch.setattr(jax_benchmark, "_device_bytes", lambda device: needed - 1)
    found = harness.run_cases(
        "fp8_linear", jax_benchmark, measure_jax, cases=["small"], implementations=[implementation("onchip xla")],
        device="cpu", dtype="float32", repeats=1, console=Console(file=StringIO()),
    )  # fmt: skip
    reason = f"the problem was not made: MemoryError: it needs {needed} bytes of device memory; {needed - 1} are there"
    assert found == harness.Outcome([], [harness.NotRun("onchip xla", "small", None, reason)])


def test_what_a_device_has_is_asked_of_jax(monkeypatch):
    class Device:
        def memory_stats(self):
            return self.stats

    monkeypatch.setattr(jax, "devices", lambda platform: [Device()])
    for stats, expected in ((None, None), ({}, None), ({"bytes_limit": 9, "bytes_in_use": 2}, 7)):
        Device.stats = stats
        assert jax_benchmark._device_bytes("cuda") == expected


def test_suite_and_summary():
    assert jax_benchmark.SUITES["primus"] == cases.SUITES["primus"]
    times = {"llama3.1-8b-qkv-1": (8.0, 2.0), "llama3.1-8b-out-1": (9.0, 9.0), "qwen2.5-7b-qkv-1": (1.0, 9.0)}
    rows = [
        {"case": case, "dtype": "bfloat16", "mode": "forward", "impl": f"{impl} 1.0", "median_ms": ms}
        for case, both in times.items()
        for impl, ms in zip((jax_peers.PRODUCT, "onchip mosaic_gpu"), both, strict=True)
    ]
    (line,) = jax_benchmark.summary(rows)  # qwen2.5-7b's K is 3584
    assert (line["implementation"], line["times_faster_than"]) == ("onchip mosaic_gpu 1.0", f"{jax_peers.PRODUCT} 1.0")
    assert (line["cases"], line["geometric_mean"], line["least"]) == (2, pytest.approx(2.0), 1.0)
