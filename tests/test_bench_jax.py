"""What measures JAX, and a tiny real run of the first op's benchmark in JAX."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from rich.console import Console

from onchip.bench import environment, measure_jax, plots
from onchip.bench import jax_steps as jax_bench
from onchip.bench import peers as bench_peers
from onchip.bench.jax_peers import IGNORED
from onchip.bench.ops import linear_cross_entropy_jax as benchmark
from onchip.bench.ops import linear_cross_entropy_jax_peers as jax_peers
from onchip.bench.run import run_bench
from onchip.ops.linear_cross_entropy import cases
from onchip.vocab import memory
from shared_jax import quick_compilation  # noqa: F401

SMALL = cases.Case("small", tokens=96, hidden=32, vocab=1000)
GRADIENTS = ("grad_hidden", "grad_weight")


def right(checked: Mapping[str, tuple[float, float]]) -> list[str]:
    return [name for name, (error, bound) in checked.items() if error <= bound]


# ------------------------------------------------------------------------------------------------------------ measuring


def test_memory_is_what_xla_has_planned() -> None:
    x = jnp.ones((2048, 512))
    step = jax_bench.Step(lambda x: [jnp.tanh(x @ x.T) @ x], (x,))  # the inner product has 16 MiB
    extra = measure_jax.peak_extra_bytes(step, device="cpu")
    assert extra == step.compiled.memory_analysis().temp_size_in_bytes
    assert 16 << 20 <= extra < 36 << 20
    assert 0 < measure_jax.compile_seconds(step) < 60


def test_time_is_until_the_results_are_there() -> None:
    x = jnp.ones((1024, 1024))
    long = jax_bench.Step(lambda x: [jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 1024, x)], (x,))
    short = jax_bench.Step(lambda x: [x + 1], (x,))
    timings = measure_jax.time_interleaved({"long": long, "short": short}, device="cpu", repeats=2)
    assert timings["long"].median_ms > 3 * timings["short"].median_ms > 0


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13010")
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", client=client)
    monkeypatch.setattr(jax, "devices", lambda *platform: [device])
    monkeypatch.setattr(environment, "_output", lambda command: "580.1, 81559\n580.1, 81559")
    assert environment.device_slug("cuda", "jax") == "h100"
    described = environment._gpu("jax")
    assert (described["driver"], described["gpu_bytes"], described["cuda"]) == ("580.1", 81559 << 20, "13.1")


@pytest.mark.parametrize(
    ("framework", "module", "unwanted"), [("torch", "benchmark", ["jax"]), ("jax", "jax_benchmark", ["torch", "optax"])]
)
def test_the_other_framework_is_not_loaded(framework: str, module: str, unwanted: list[str]) -> None:
    code = (
        f"import sys; from onchip.ops.linear_cross_entropy import {module}; import onchip.bench.run as run;"
        f"from onchip.ops.cross_entropy import {module}; from onchip.ops.linear_log_probs import {module};"
        f"from onchip.ops.linear_jsd import {module};"
        "run.environment._busy_cores = lambda: 0;"
        f"run.environment.describe(run.resolve_device('cpu', '{framework}'), '{framework}');"
        f"run.measuring('{framework}').release('cpu'); print([m for m in {unwanted} if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


# ------------------------------------------------------------------------------------------------------------ the bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(environment, "_busy_cores", lambda: 0.0)
    monkeypatch.setattr(benchmark, "CASES", {"small": SMALL})

    def run(dtype: str, impls: list[str] | None = None, *, add: bool = False) -> dict[str, Any]:
        return run_bench(
            "linear_cross_entropy",
            benchmark.__name__,
            framework="jax",
            cases=["small"],
            device="cpu",
            dtype=dtype,
            repeats=1,
            impls=impls,
            out=tmp_path,
            console=Console(file=StringIO()),
            add=add,
        )

    return run


@pytest.fixture
def _no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    version = bench_peers.metadata.version

    def missing(package: str) -> str:
        if package in ("tokamax", "jax-cce"):
            raise bench_peers.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(bench_peers.metadata, "version", missing)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("_no_libraries")
def test_linear_cross_entropy(dtype: str, bench: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    document = bench(dtype)
    names = [impl.name for impl in benchmark.IMPLEMENTATIONS]
    not_run = [n["impl"] for n in document["not_run"]]
    narrow = [n for n in names if "16-bit" in n] if dtype == "float32" else []
    assert not_run == [
        "onchip, 64 MiB + 4TH", "onchip triton", "onchip xla", *narrow, "tokamax xla", "tokamax chunked_xla", "jax-cce",
    ]  # fmt: skip
    assert [plots.short_name(r["impl"]) for r in document["rows"]] == [n for n in names if n not in not_run] * 2
    for row in document["rows"]:
        assert row["ok"], row
        assert row["median_ms"] > 0
        assert row["ratio_to_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])
        assert row["compile_s"] > 0
        assert row["extra_bytes"] > 0
        names = ["loss"] if row["mode"] == "forward" else ["loss", *GRADIENTS]
        assert list(row["errors"]) == names
    own = [row for row in document["rows"] if row["impl"].startswith("onchip")]
    assert {row["config"]["backend"] for row in own} == {"xla"}
    assert [row["config"]["strategy"] == "forward" for row in own] == [True, True, False, False]
    described = document["environment"]
    assert (described["op"], described["framework"]) == ("linear_cross_entropy", "jax")
    assert (described["jax"], described["jaxlib"]) == (jax.__version__, jax.lib.__version__)
    assert "torch" not in described
    stem = tmp_path / f"{described['date'][:10]}-{described['device']}-linear_cross_entropy-jax"
    assert json.loads(stem.with_name(f"{stem.name}.json").read_text()) == document
    assert "jaxlib" in stem.with_name(f"{stem.name}.html").read_text()


def test_add(bench: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    bench("float32", ["onchip auto"])
    bench("float32", ["XLA, float32 logits"], add=True)
    document = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [plots.short_name(r["impl"]) for r in document["rows"]] == ["onchip auto", "XLA, float32 logits"] * 2


@pytest.fixture
def problem() -> benchmark.Problem:
    return benchmark.make_problem(SMALL, "cpu", "float32")


@pytest.mark.parametrize("spoil", [lambda g: g * 1.001, lambda g: g.at[3].set(jnp.nan)])
def test_a_wrong_gradient_is_found(problem: benchmark.Problem, spoil: Callable[[Array], Array]) -> None:
    reference = benchmark.reference(problem)
    (impl,) = (i for i in benchmark.IMPLEMENTATIONS if i.name == "XLA, float32 logits")
    loss, *gradients = impl.steps(problem)["forward+backward"]()
    assert right(benchmark.check(reference, "forward+backward", [loss, *gradients])) == ["loss", *GRADIENTS]
    for i, name in enumerate(GRADIENTS):
        spoiled = [spoil(g) if j == i else g for j, g in enumerate(gradients)]
        found = right(benchmark.check(reference, "forward+backward", [loss, *spoiled]))
        assert found == ["loss", *(n for n in GRADIENTS if n != name)]


def test_a_result_of_another_shape_is_refused(problem: benchmark.Problem) -> None:
    reference = benchmark.reference(problem)
    with pytest.raises(ValueError, match="shape"):
        benchmark.check(reference, "forward", [jnp.zeros(8)])
    with pytest.raises(ValueError, match="shorter"):
        benchmark.check(reference, "forward+backward", [reference.values["loss"]])


@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_references_of_cpu_and_gpu_agree(ignored: float) -> None:
    case = cases.Case("small", tokens=97, hidden=32, vocab=1000, ignored=ignored)
    problem = benchmark.make_problem(case, "cpu", "bfloat16")
    assert problem.some_ignored == bool(ignored)
    pairs = zip(benchmark._float64_on_gpu(problem, chunk=30), benchmark._float64_on_cpu(problem), strict=True)
    for by_framework, by_oracle in pairs:
        assert by_framework.dtype == np.float64
        np.testing.assert_allclose(np.asarray(by_framework), by_oracle, rtol=1e-10, atol=1e-14)


def test_all_count_the_same_tokens_where_some_are_ignored() -> None:
    case = cases.Case("small", tokens=96, hidden=32, vocab=1000, ignored=0.5)
    problem = benchmark.make_problem(case, "cpu", "float32")
    reference = benchmark.reference(problem)
    for impl in benchmark.IMPLEMENTATIONS:
        if impl.unavailable("cpu", "float32") is not None:
            continue
        if isinstance(impl, bench_peers.Implementation) and not impl.peer.ignores:
            with pytest.raises(NotImplementedError, match="no tokens that don't count"):
                impl.steps(problem)
            continue
        checked = benchmark.check(reference, "forward+backward", impl.steps(problem)["forward+backward"]())
        assert right(checked) == ["loss", *GRADIENTS], impl.name


def test_inputs_drawn_on_the_device_are_distributed_as_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half the tokens ignored, words' frequencies, sure predictions, larger logits.
    def draw(case: cases.Case, dtype: str) -> tuple[Array, Array, Array]:
        monkeypatch.setattr(jax, "devices", lambda platform: cpu)
        problem = benchmark.make_problem(case, "cuda", dtype)
        return problem.hidden, problem.weight, problem.labels

    cpu = jax.devices("cpu")
    drawn = {"ignored": 0.5, "zipf": True, "target_prob": 0.99, "logit_std": 3.0}
    hidden, weight, labels = (np.asarray(x) for x in draw(cases.Case("c", 4000, 64, 50, **drawn), "float32"))
    kept = labels != IGNORED
    assert kept.mean() == 0.5
    assert weight.std() * 8 == pytest.approx(3, rel=0.05)
    shares = np.bincount(labels[kept], minlength=50) / kept.sum()
    assert shares[0] == pytest.approx(1 / sum(1 / n for n in range(1, 51)), abs=0.04)
    assert shares[49] < 0.02
    probs = np.asarray(jax.nn.softmax(hidden[kept] @ weight.T))[np.arange(kept.sum()), labels[kept]]
    assert 0.97 < np.median(probs) < 0.997
    hidden, weight, labels = draw(cases.Case("plain", tokens=4000, hidden=64, vocab=50), "bfloat16")
    assert (hidden.dtype, weight.dtype, labels.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.int32)
    assert float(hidden.std()) == pytest.approx(1, rel=0.02)
    assert np.bincount(labels, minlength=50).min() > 40


def test_options_are_for_no_bench_case() -> None:
    case = cases.Case("odd", tokens=8, hidden=4, vocab=10, options={"softcap": 3.0})
    with pytest.raises(AssertionError):
        benchmark.make_problem(case, "cpu", "float32")


def test_a_named_backend_says_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = {"triton": "no Triton", "xla": None}
    monkeypatch.setattr(benchmark, "plain_refusals", lambda device, dtype, framework: refusals)
    reasons = {i.name: i.unavailable("cuda", "bfloat16") for i in benchmark.IMPLEMENTATIONS}
    assert [reasons[f"onchip {name}"] for name in ("auto", "triton", "xla")] == [None, "no Triton", None]


def test_budgets() -> None:
    llama = memory.Problem(4096, 4096, 128256, dtype="bfloat16", device="cuda", compacted=True)
    assert benchmark._small(llama) == (64 << 20) + 4 * 4096 * 4096
    assert benchmark._eighth_of_logits(llama) == 4096 * 128256 * 4 // 8


# ------------------------------------------------------------------------------------------------------------ the peers


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a module with one function in the place of a library."""

    def put(package: str, **functions: Any) -> None:
        module = ModuleType(package)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, package, module)

    return put


@pytest.mark.usefixtures("_no_libraries")
def test_optional_peers_say_why_they_do_not_run() -> None:
    for peer in jax_peers.PEERS:
        if peer.package in ("tokamax", "jax-cce"):
            reason = f"{peer.package} is not installed; pip install 'onchip[peers-jax]'"
            assert peer.unavailable("cuda", "bfloat16") == reason


def test_tokamax_gets_its_own_layout(problem: benchmark.Problem, library: Callable[..., None]) -> None:
    asked = []

    def loss(x: Array, labels: Array, weights: Array, *, reduction: str, implementation: str) -> Array:
        asked.append((weights.shape, reduction, implementation))
        return jax_peers.plain(wide=True, one_hot=False)(x, weights.T, labels)

    library("tokamax", linear_softmax_cross_entropy_loss=loss)
    reference = benchmark.reference(problem)
    for name in ("tokamax xla", "tokamax chunked_xla"):
        (impl,) = (i for i in benchmark.IMPLEMENTATIONS if i.name == name)
        made = impl.steps(problem)["forward+backward"]()
        assert made[2].shape == (SMALL.hidden, SMALL.vocab)
        assert right(benchmark.check(reference, "forward+backward", made)) == ["loss", *GRADIENTS]
    assert asked == [((32, 1000), "mean", "xla"), ((32, 1000), "mean", "chunked_xla")]


def test_jax_cce(problem: benchmark.Problem, library: Callable[..., None]) -> None:
    def loss(x: Array, w: Array, labels: Array, *, chunk_size: int) -> Array:
        assert chunk_size == 4096
        return jax_peers.plain(wide=True, one_hot=True)(x, w, labels)

    library("jax_cce", linear_cross_entropy=loss)
    (impl,) = (i for i in benchmark.IMPLEMENTATIONS if i.name == "jax-cce")
    checked = benchmark.check(benchmark.reference(problem), "forward", impl.steps(problem)["forward"]())
    assert right(checked) == ["loss"]
