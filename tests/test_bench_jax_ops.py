"""The benchmarks of cross_entropy, linear_log_probs and linear_jsd in JAX: small real runs, references, inputs."""

import dataclasses
from importlib import metadata
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from onchip.bench import jax_steps as jax_bench
from onchip.bench import peers as bench_peers
from onchip.bench import plots
from onchip.bench.ops import cross_entropy_jax as cross_entropy
from onchip.bench.ops import linear_jsd_jax as linear_jsd
from onchip.bench.ops import linear_log_probs_jax as linear_log_probs
from onchip.bench.run import run_bench
from onchip.cli import BENCHMARKS, OPS
from onchip.ops.cross_entropy import reference as cross_entropy_oracle
from onchip.ops.cross_entropy.cases import Case as CrossEntropyCase
from onchip.ops.linear_jsd import reference as jsd_oracle
from onchip.ops.linear_jsd.cases import Case as JsdCase
from onchip.ops.linear_log_probs import reference as log_probs_oracle
from onchip.ops.linear_log_probs.cases import Case as LogProbsCase
from shared_jax import quick_compilation  # noqa: F401

# Ragged sizes, and what each op has of its own.
SMALL = {
    cross_entropy: CrossEntropyCase("small", 65, 300, sliced=4, ignored=0.5),
    linear_log_probs: LogProbsCase("small", 65, 24, 300, options={"entropy": True}),
    linear_jsd: JsdCase("small", 65, 24, 300, teacher_hidden=40, options={"beta": 0.3}),
}
each_op = pytest.mark.parametrize("op", SMALL, ids=lambda op: op.__name__.split(".")[2])


def test_every_op_is_benchmarked_in_both_frameworks():
    assert set(BENCHMARKS["jax"]) == set(BENCHMARKS["torch"]) == {*OPS, "fp8_linear"}


# In bfloat16, where all implementations run; the page takes longer than all else.
@each_op
def test_a_run(op, tmp_path, monkeypatch):
    monkeypatch.setattr(op, "CASES", {"small": SMALL[op]})
    monkeypatch.setattr("onchip.bench.report.html_page", lambda document: "")
    monkeypatch.setattr("onchip.bench.environment._busy_cores", lambda: 0.0)
    names = [impl.name for impl in op.IMPLEMENTATIONS]
    document = run_bench(
        op.__name__.split(".")[2], op.__name__, framework="jax", cases=["small"], device="cpu", dtype="bfloat16",
        repeats=1, impls=None, out=tmp_path, console=Console(file=StringIO()),
    )  # fmt: skip
    assert document["not_run"] == []
    assert [plots.short_name(row["impl"]) for row in document["rows"]] == names * 2
    for row in document["rows"]:
        assert row["ok"], row
        assert row["median_ms"] > 0
        assert row["compile_s"] > 0
        assert row["extra_bytes"] > 0
        assert row["ratio_to_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])


def oracle_values(op, p):
    """What the NumPy oracle makes of the same numbers."""
    f64 = [np.asarray(x, np.float64) for x in (p.arrays if op is linear_jsd else ())]
    if op is cross_entropy:
        made = cross_entropy_oracle.cross_entropy(np.asarray(p.logits, np.float64)[:, : p.vocab], np.asarray(p.labels))
        return {"loss": made.loss, "grad_logits": np.pad(made.grad_logits, ((0, 0), (0, p.logits.shape[1] - p.vocab)))}
    if op is linear_log_probs:
        made = log_probs_oracle.linear_log_probs(
            np.asarray(p.hidden, np.float64),
            np.asarray(p.weight, np.float64),
            np.asarray(p.ids),
            grad_log_prob=np.full(len(p.ids), 1 / len(p.ids)),
            grad_entropy=1 / len(p.ids) if p.entropy else 0.0,
            grad_lse=0.0,
        )
        names = ("log_prob", *(("entropy",) if p.entropy else ()), "grad_hidden", "grad_weight")
        return {name: getattr(made, name) for name in names}
    made = jsd_oracle.linear_jsd(*f64, beta=p.beta)
    return {"loss": made.loss, "grad_hidden": made.grad_student_hidden, "grad_weight": made.grad_student_weight}


def variants(op, problem):
    if op is linear_log_probs:
        return [dataclasses.replace(problem, entropy=entropy) for entropy in (True, False)]
    return [dataclasses.replace(problem, beta=b) for b in (0.0, 0.3, 1.0)] if op is linear_jsd else [problem]


@each_op
def test_the_reference_is_the_oracle_and_finds_a_wrong_gradient(op, monkeypatch):
    # In slices of 30 rows, of which the last is filled up with zeros.
    whole = jax_bench.scan_rows
    monkeypatch.setattr(op, "scan_rows", lambda one, start, arrays, row_bytes: whole(one, start, arrays, 1, 30))
    problem = op.make_problem(SMALL[op], "cpu", "float32")
    for p in variants(op, problem):
        reference = op.reference(p)
        expected = oracle_values(op, p)
        assert list(reference.values) == list(expected)
        for name, value in reference.values.items():
            assert value.dtype == np.float64
            np.testing.assert_allclose(np.asarray(value), expected[name], rtol=1e-9, atol=1e-13, err_msg=name)
    (impl,) = (impl for impl in op.IMPLEMENTATIONS if impl.name == "XLA, float32 logits")
    *values, gradient = impl.steps(p)["forward+backward"]()
    for spoiled in (gradient * 1.001, gradient.at[3].set(jnp.nan)):
        checked = op.check(reference, "forward+backward", [*values, spoiled])
        assert [error <= bound for error, bound in checked.values()] == [*[True] * len(values), False]


def test_the_floor_moves_what_the_loss_must():
    problem = cross_entropy.make_problem(SMALL[cross_entropy], "cpu", "float32")
    (half,), (all_,) = (cross_entropy.floor(problem, mode)() for mode in ("forward", "forward+backward"))
    assert (half.shape, all_.shape) == ((33, 304), (65, 304))
    assert all_.unsafe_buffer_pointer() != problem.logits.unsafe_buffer_pointer()
    jsd = linear_jsd.make_problem(SMALL[linear_jsd], "cpu", "float32")
    shapes = [x.shape for x in linear_jsd.floor(jsd, "forward+backward")()]
    assert shapes == [(65, 300), (65, 300), (65, 24), (300, 24)]
    assert [x.shape for x in linear_jsd.floor(jsd, "forward")()] == shapes[:2]


def test_logits_are_drawn_as_their_case_says():
    case = CrossEntropyCase("c", 4000, 50, logit_std=3.0, logit_offset=100.0, zipf=True, ignored=0.25)
    problem = cross_entropy.make_problem(case, "cpu", "float32")
    assert float(problem.logits.mean()) == pytest.approx(100, abs=0.1)
    assert float(problem.logits.std()) == pytest.approx(3, rel=0.02)
    labels = np.asarray(problem.labels)
    kept = labels[labels != jax_bench.IGNORED]
    assert (len(kept), labels.dtype) == (3000, np.int32)
    assert (kept == 0).mean() == pytest.approx(1 / sum(1 / n for n in range(1, 51)), abs=0.04)


@each_op
def test_default_cases_exist(op):
    assert all(name in op.CASES for names in op.DEFAULT_CASES.values() for name in names)


def test_optax_may_be_missing(monkeypatch):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(bench_peers.metadata, "version", missing)
    reasons = {impl.name: impl.unavailable("cuda", "bfloat16") for impl in cross_entropy.IMPLEMENTATIONS}
    assert reasons.pop("optax, float32 logits") == "optax is not installed; pip install 'onchip[peers-jax]'"
    assert set(reasons.values()) == {None}


@each_op
def test_in_float32_the_plain_expression_is_one(op):
    reasons = {impl.name: impl.unavailable("cpu", "float32") for impl in op.IMPLEMENTATIONS}
    assert [name for name, reason in reasons.items() if reason] == ["XLA, 16-bit logits"]
    assert [name for name in reasons if name.startswith("onchip")] == ["onchip auto"]


def test_steps_drop_what_is_not_returned_and_sum_the_means():
    x = jnp.arange(3.0)
    step = jax_bench.steps(lambda x, y: (x * y, None), (x, x + 1), leaves=1)["forward+backward"]
    product, gradient = step()
    np.testing.assert_allclose(product, x * (x + 1))
    np.testing.assert_allclose(gradient, (x + 1) / 3, rtol=1e-6)
    assert isinstance(step.compiled, jax.stages.Compiled)
