"""The benchmark of fp8_linear in both frameworks: small real runs, its check of results, a peer."""

import dataclasses
import importlib.util
import math
from io import StringIO

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from onchip.bench import benchmark as bench_benchmark
from onchip.bench import report
from onchip.bench.run import run_bench
from onchip.fp8 import torch_quantize
from onchip.fp8.torch_products import dequantized_product
from onchip.ops.fp8_linear import bench as module
from onchip.ops.fp8_linear import cases
from onchip.oracle.checks import adapter_of

# Ragged sizes, with more rows than are checked at the end of each result.
SMALL = cases.Fp8LinearCase("small", 200, 136, 150)
TORCH, JAX = module.TORCH, module.JAX
pytestmark = pytest.mark.usefixtures("one_thread")
each = pytest.mark.parametrize("benchmark", [TORCH, JAX], ids=["torch", "jax"])


def plain_of(benchmark):
    return implementation(benchmark, module.LINEAR if benchmark is TORCH else module.UNQUANTISED)


def own_of(benchmark):
    return implementation(benchmark, "onchip dequantize" if benchmark is TORCH else "onchip xla")


def implementation(benchmark, name):
    (found,) = (impl for impl in benchmark.IMPLEMENTATIONS if impl.name == name)
    return found


def array(x):
    return adapter_of(x).as_array(x)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for benchmark in (TORCH, JAX):
        monkeypatch.setattr(benchmark, "CASES", {**benchmark.CASES, "small": SMALL})


@pytest.mark.parametrize(
    "benchmark", [pytest.param(TORCH, id="torch"), pytest.param(JAX, id="jax", marks=pytest.mark.slow)]
)
def test_a_run(benchmark, tmp_path, quiet_bench):
    document = run_bench(
        "fp8_linear", benchmark.framework, cases=["small"], device="cpu", dtype="bfloat16", repeats=1, out=tmp_path,
        console=Console(file=StringIO()),
        impls=None if benchmark is TORCH else ["onchip*"],  # JAX takes seconds to compile each
    )  # fmt: skip
    own, not_here = ["onchip xla"], {"onchip mosaic_gpu"}
    if benchmark is TORCH:
        own = ["onchip auto", "onchip dequantize"]
        not_here = {"onchip scaled_mm", "onchip triton", module.QUANTIZED_BEFORE, "torchao blockwise", module.SCALED_MM}
    assert {n["impl"] for n in document["not_run"]} == not_here
    rows = {(r["mode"], report.short_name(r["impl"])): r for r in document["rows"]}
    plain = [(mode, module.LINEAR) for mode in module.LAYER] if benchmark is TORCH else []
    assert set(rows) == {*((m, n) for m in benchmark.MODES for n in own), *plain}
    for (mode, name), row in rows.items():
        assert row["ok"]
        assert row["error_bound"] == 10 ** (-28 / 20)
        assert list(row["errors"]) == list(module.RETURNED[mode])
        # 28.65 dB is 0.037; of few numbers it is a little more.
        assert all((error > 0.02) == (name != module.LINEAR) for error in row["errors"].values())
        assert (row["floor_ms"] is not None) == (mode in module.LAYER)
    assert rows["forward", own[0]]["config"] == {"backend": own[-1].removeprefix("onchip ")}


@each
def test_wrong_results_are_found(benchmark):
    problem = benchmark.make_problem(SMALL, "cpu", "float32")
    reference = benchmark.reference(problem)
    made = benchmark.steps(problem, plain_of(benchmark))["forward+backward"]()

    def right(spoil):
        checked = benchmark.check(reference, "forward+backward", [spoil(x) for x in made])
        return [error <= bound for error, bound in checked.values()]

    def with_zeros(x):
        rows = np.ones((len(x), 1), np.float32)
        rows[-9:] = 0
        return x * (rows if benchmark is JAX else torch.from_numpy(rows))

    def with_nan(x):
        columns = np.zeros((1, x.shape[1]), np.float32)
        columns[0, -1] = math.nan
        return x + (columns if benchmark is JAX else torch.from_numpy(columns))

    assert right(lambda x: x) == [True] * 3
    for spoil in (lambda x: x * 1.05, with_zeros, with_nan):
        assert right(spoil) == [False] * 3
    with pytest.raises(ValueError, match=r"out has shape \[136, 200\] where \[200, 136\] is right"):
        benchmark.check(reference, "forward", [problem.grad_out.T])
    with pytest.raises(ValueError, match="shorter"):
        benchmark.check(reference, "forward+backward", [problem.grad_out])


@each
def test_the_reference_is_the_unquantised_layer(benchmark, monkeypatch):
    monkeypatch.setattr(bench_benchmark, "CHUNK", 50 * 150)  # 50 rows of 150 numbers at a time
    problem = benchmark.make_problem(SMALL, "cpu", "float32")
    x, w, g = (array(a) for a in (problem.x, problem.weight, problem.grad_out))
    exact = {"out": x @ w.T, "grad_x": g @ w, "grad_weight": g.T @ x}
    reference = benchmark.reference(problem)
    for name, right in exact.items():
        rows = reference[name].rows
        assert 64 < len(rows) <= 128
        assert rows[-64:].tolist() == list(range(len(right) - 64, len(right)))
        np.testing.assert_allclose(array(reference[name].values), right[rows], rtol=1e-12, atol=1e-12)
    made = benchmark.steps(problem, plain_of(benchmark))["forward+backward"]()
    for result, right in zip(made, exact.values(), strict=True):
        np.testing.assert_allclose(array(result), right, rtol=1e-4, atol=1e-4)
    shapes = [tuple(a.shape) for a in benchmark.floor(problem, "forward+backward")()]
    assert shapes == [a.shape for a in exact.values()]
    assert [tuple(a.shape) for a in benchmark.floor(problem, "forward")()] == shapes[:1]


def test_every_step_quantises_the_weight_once_or_it_was_before(monkeypatch):
    made = []
    quantize = torch_quantize.quantize

    def counted(*arguments, by_block=False, turned=True, **wanted):
        if by_block:
            made.append(turned)
        return quantize(*arguments, by_block=by_block, turned=turned, **wanted)

    monkeypatch.setattr(torch_quantize, "quantize", counted)
    problem = TORCH.make_problem(SMALL, "cpu", "float32")
    steps = TORCH.steps(problem, own_of(TORCH))
    for mode, both in zip(module.LAYER, (False, True), strict=True):
        made.clear()
        for _ in range(3):
            steps[mode]()
        assert made == [both] * 3
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))  # where copies aren't checked
    before = TORCH.steps(problem, implementation(TORCH, module.QUANTIZED_BEFORE))
    assert tuple(before) == tuple(module.LAYER)
    made.clear()
    for mode, step in before.items():
        assert all(torch.equal(p, q) for p, q in zip(step(), steps[mode](), strict=True))
    assert len(made) == 2


def test_inputs_in_jax_are_normal_and_of_many_values():
    """JAX draws 128 values, none beyond 2.7, where it is asked for bfloat16."""
    made = JAX.make_problem(dataclasses.replace(SMALL, m=2048), "cpu", "bfloat16")
    assert {a.dtype.name for a in (made.x, made.weight, made.grad_out)} == {"bfloat16"}
    for x, std in ((made.x, 1), (made.weight, SMALL.k**-0.5), (made.grad_out, 1)):
        drawn = np.asarray(x, np.float32)
        assert drawn.std() == pytest.approx(std, rel=0.03)
        assert np.abs(drawn).max() > 3.2 * std
        assert len(np.unique(drawn)) > 500
    assert len(np.unique(np.asarray(made.x[:, 0], np.float32))) > 500  # blocks of rows are different ones


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
def torchao(stand_in):
    stand_in("torchao.prototype.blockwise_fp8_training.linear", {"Float8BlockwiseLinear": Float8BlockwiseLinear})


def assert_right(problem, steps):
    reference = TORCH.reference(problem)
    for mode, step in steps.items():
        assert all(error <= bound for error, bound in TORCH.check(reference, mode, step()).values())


def test_torchao_is_called_as_its_interface_wants(torchao):
    problem = TORCH.make_problem(SMALL, "cpu", "bfloat16")
    assert_right(problem, TORCH.steps(problem, implementation(TORCH, "torchao blockwise")))


def test_torchao_is_not_asked_for_more_elements_than_it_counts(torchao):
    step = module._torchao()
    x, weight = torch.empty(32768, 128, device="meta"), torch.nn.Parameter(torch.empty(65536, 128, device="meta"))
    with pytest.raises(ValueError, match="its kernels count elements in 32 bits, and the output has 2147483648"):
        step(x, weight)
    assert step(x[:-128], weight).shape == (32640, 65536)


def test_peers_say_why_they_do_not_run(monkeypatch):
    torchao = implementation(TORCH, "torchao blockwise")
    assert torchao.unavailable("cpu", "bfloat16") == "it runs on CUDA devices only"
    assert "not float32" in torchao.unavailable("cuda", "float32")
    if importlib.util.find_spec("torchao") is None:
        assert torchao.unavailable("cuda", "bfloat16") == "torchao is not installed; pip install torchao"
    assert "timed on the CPU" in own_of(TORCH).unavailable("cuda", "bfloat16")
    assert own_of(TORCH).unavailable("cpu", "bfloat16") is None
    before = implementation(TORCH, module.QUANTIZED_BEFORE)
    assert "checks the copies" in before.unavailable("cpu", "bfloat16")
    assert before.unavailable("cuda", "bfloat16") is None
    problem = TORCH.make_problem(SMALL, "cpu", "float32")
    assert before.config(problem, "forward") == {"backend": "dequantize"}  # which one 'auto' took
    assert "CUDA tensors" in implementation(TORCH, module.SCALED_MM).unavailable("cpu", "bfloat16")
    mosaic = implementation(JAX, "onchip mosaic_gpu").unavailable("cpu", "bfloat16")
    assert mosaic == "it runs on NVIDIA GPUs, not on 'cpu'"


def test_a_product_is_that_of_the_backend_and_of_operands_made_before():
    problem = TORCH.make_problem(SMALL, "cpu", "float32")
    assert [by_block for *_, by_block in problem.operands.values()] == [True, True, False]
    assert problem.operands is problem.operands
    scaled_mm = dataclasses.replace(implementation(TORCH, module.SCALED_MM), load=lambda: dequantized_product)
    steps = TORCH.steps(problem, scaled_mm)
    assert tuple(steps) == module.PRODUCTS
    assert_right(problem, steps)
