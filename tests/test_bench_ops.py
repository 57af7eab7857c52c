"""The benchmarks of cross_entropy, linear_log_probs and linear_jsd: small real runs, references, peers' stand-ins."""

import dataclasses
from importlib import import_module
from io import StringIO
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from onchip.bench import peers as bench_peers
from onchip.bench import plots
from onchip.bench.ops import cross_entropy, linear_jsd, linear_log_probs
from onchip.bench.run import run_bench
from onchip.ops.cross_entropy import reference as cross_entropy_oracle
from onchip.ops.cross_entropy.cases import Case as CrossEntropyCase
from onchip.ops.linear_jsd import reference as jsd_oracle
from onchip.ops.linear_jsd.cases import Case as JsdCase
from onchip.ops.linear_log_probs import reference as log_probs_oracle
from onchip.ops.linear_log_probs.cases import Case as LogProbsCase

# Ragged sizes, and what each op has of its own.
SMALL = {
    cross_entropy: CrossEntropyCase("small", 65, 300, sliced=4, ignored=0.5),
    linear_log_probs: LogProbsCase("small", 65, 24, 300, options={"entropy": True}),
    linear_jsd: JsdCase("small", 65, 24, 300, teacher_hidden=40, options={"beta": 0.3}),
}
OPS = pytest.mark.parametrize("op", SMALL, ids=lambda op: op.__name__.split(".")[2])
NOT_HERE = ("liger", "quack", "trl", "torch.compile", "onchip triton")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@OPS
def test_a_run(op, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(op, "CASES", {"small": SMALL[op]})
    monkeypatch.setattr("onchip.bench.environment._busy_cores", lambda: 0.0)
    names = [impl.name for impl in op.IMPLEMENTATIONS if not impl.name.startswith("torch.compile")]
    document = run_bench(
        op.__name__.split(".")[2], op.__name__, cases=["small"], device="cpu", dtype=dtype, repeats=1, impls=names,
        out=tmp_path, console=Console(file=StringIO()),
    )  # fmt: skip
    same = {"torch eager, float32 logits"} if dtype == "float32" else set()
    assert {n["impl"] for n in document["not_run"]} == same | {n for n in names if n.startswith(NOT_HERE)}
    assert [row for row in document["rows"] if not row["ok"]] == []
    ran = {plots.short_name(row["impl"]) for row in document["rows"]}
    assert ran == {n for n in names if n not in same and not n.startswith(NOT_HERE)}
    assert all(row["floor_ms"] for row in document["rows"])


def float64(*tensors):
    return [x.detach().double().numpy() if x.is_floating_point() else x.numpy() for x in tensors]


def oracle_values(op, p):
    if op is cross_entropy:
        made = cross_entropy_oracle.cross_entropy(*float64(p.logits, p.target))
        return {"loss": made.loss, "grad_logits": made.grad_logits}
    if op is linear_log_probs:
        each = 1 / len(p.ids)
        made = log_probs_oracle.linear_log_probs(
            *float64(p.hidden, p.weight, p.ids),
            grad_log_prob=np.full(len(p.ids), each),
            grad_entropy=each,
            grad_lse=0.0,
        )
        names = ("log_prob", "entropy", "grad_hidden", "grad_weight")
        return {name: getattr(made, name) for name in names}
    made = jsd_oracle.linear_jsd(*float64(p.hidden, p.weight, p.teacher_hidden, p.teacher_weight), beta=p.beta)
    return {"loss": made.loss, "grad_hidden": made.grad_student_hidden, "grad_weight": made.grad_student_weight}


@OPS
def test_the_reference_is_the_oracle(op):
    problem = op.make_problem(SMALL[op], "cpu", "float32")
    values = op.reference(problem).values
    expected = oracle_values(op, problem)
    assert list(values) == list(expected)
    for name, value in values.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-9, atol=1e-13, err_msg=name)


@OPS
def test_a_wrong_gradient_is_found(op):
    problem = op.make_problem(SMALL[op], "cpu", "float32")
    reference = op.reference(problem)
    (eager,) = (impl for impl in op.IMPLEMENTATIONS if impl.name == "torch eager")
    *values, gradient = eager.steps(problem)["forward+backward"]()
    for spoiled in (gradient * 1.001, gradient.index_fill(0, torch.tensor([3]), torch.nan)):
        checked = op.check(reference, "forward+backward", [*values, spoiled])
        assert [error <= bound for error, bound in checked.values()] == [*[True] * len(values), False]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_jsd_reference_at_both_ends(beta):
    problem = dataclasses.replace(linear_jsd.make_problem(SMALL[linear_jsd], "cpu", "float32"), beta=beta)
    expected = oracle_values(linear_jsd, problem)
    for name, value in linear_jsd.reference(problem).values.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-9, atol=1e-13, err_msg=name)


@OPS
def test_default_cases_exist(op):
    assert all(name in op.CASES for names in op.DEFAULT_CASES.values() for name in names)
    assert all(case.name == name for name, case in op.CASES.items())


def test_in_place_steps_go_on_after_the_first():
    problem = cross_entropy.make_problem(SMALL[cross_entropy], "cpu", "float32")
    before = problem.logits.detach().clone()
    (impl,) = (impl for impl in cross_entropy.IMPLEMENTATIONS if impl.name == "onchip auto, in place")
    step = impl.steps(problem)["forward+backward"]
    assert len(step()) == 2
    assert len(step()) == 1
    torch.testing.assert_close(problem.logits.detach(), before, rtol=0, atol=0)


# ------------------------------------------------------------------------- stand-ins with the interfaces of the peers


def modules(monkeypatch, **contents):
    """Modules by dotted name (`__` for dots), importable until the test ends."""
    for name, names in contents.items():
        parts = name.replace("__", ".").split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(__import__("sys").modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        vars(import_module(".".join(parts))).update(names)


class LigerCrossEntropyLoss(torch.nn.Module):
    def forward(self, _input, target):
        return F.cross_entropy(_input, target)


class LigerFusedLinearJSDLoss(torch.nn.Module):
    def __init__(
        self, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True,
        chunk_size=1024,
    ):  # fmt: skip
        super().__init__()
        assert (weight_hard_loss, weight_soft_loss) == (0.0, 1.0)
        self.beta = beta

    def forward(
        self, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias
    ):
        ls, lt = F.linear(student_input, student_weight), F.linear(teacher_input, teacher_weight)
        return linear_jsd._definition(ls.log_softmax(1), lt.log_softmax(1), self.beta) / len(true_labels)


def quack_cross_entropy(
    x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False
):
    return F.cross_entropy(x, target, reduction=reduction)


def selective_log_softmax(logits, index):
    return logits.log_softmax(-1).gather(-1, index[:, None])[:, 0]


def entropy_from_logits(logits, chunk_size=128):
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@OPS
def test_peers_are_called_as_their_interfaces_want(op, monkeypatch):
    modules(
        monkeypatch,
        liger_kernel__transformers={"LigerCrossEntropyLoss": LigerCrossEntropyLoss},
        quack__cross_entropy={"cross_entropy": quack_cross_entropy},
        trl__trainer__utils={
            "selective_log_softmax": selective_log_softmax, "entropy_from_logits": entropy_from_logits,
        },
    )  # fmt: skip
    monkeypatch.setitem(
        __import__("sys").modules,
        "liger_kernel.chunked_loss",
        SimpleNamespace(LigerFusedLinearJSDLoss=LigerFusedLinearJSDLoss),
    )
    problem = op.make_problem(SMALL[op], "cpu", "float32")
    reference = op.reference(problem)
    peers = [impl for impl in op.IMPLEMENTATIONS if impl.name.startswith(("liger", "quack", "trl"))]
    assert peers
    for impl in peers:
        for mode, step in impl.steps(problem).items():
            checked = op.check(reference, mode, step())
            assert all(error <= bound for error, bound in checked.values()), (impl.name, mode, checked)


@OPS
def test_optional_peers_say_why_they_do_not_run(op, monkeypatch):
    def missing(package):
        raise bench_peers.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(bench_peers.metadata, "version", missing)
    for impl in op.IMPLEMENTATIONS:
        if impl.name.startswith(("liger", "quack", "trl")):
            assert "is not installed" in impl.unavailable("cuda", "bfloat16")
    monkeypatch.setattr(bench_peers.metadata, "version", lambda package: "1.2+cu130")
    assert all(i.unavailable("cuda", "bfloat16") is None for i in op.IMPLEMENTATIONS if "compile" not in i.name)
    assert {i.version() for i in op.IMPLEMENTATIONS} == {"1.2", import_module("onchip").__version__}
