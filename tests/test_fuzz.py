"""`python -m fuzz`: random calls are legal, judged, shrunk, and printed as programs that fail alike."""

import functools
import itertools
import os
import subprocess
import sys
import warnings

import pytest

import onchip.torch
from fuzz import run
from fuzz.__main__ import main
from fuzz.call import program
from fuzz.draw import TABLES, legal, simpler, table
from fuzz.judge import Wrong
from onchip.groups.torch import loop

ALONE = ["cross_entropy", "--framework", "torch", "--device", "cpu"]


def simplest(framework, op, **values):
    first = {name: values[0] for name, values in table(framework, op).items()}
    return legal({"framework": framework, "device": "cpu", "op": op, "backend": "auto", **first, **values})


@pytest.fixture
def faulty(monkeypatch):
    """A loss that is off by 1e-4 of it where labels are smoothed and some tokens are ignored."""
    right = onchip.torch.cross_entropy

    @functools.wraps(right)
    def wrong(logits, target, **options):
        out = right(logits, target, **options)
        if "label_smoothing" not in options or not (target == options.get("ignore_index", -100)).any():
            return out
        return (1.0001 * out[0], out[1]) if isinstance(out, tuple) else 1.0001 * out

    monkeypatch.setattr(onchip.torch, "cross_entropy", wrong)


def test_a_fault_is_found_shrunk_and_printed(faulty, capsys):
    assert main([*ALONE, "--seed", "1"]) == 1
    printed = capsys.readouterr().out
    assert "a call fails: Wrong: " in printed
    said = printed[printed.index("from fuzz") :]
    assert "device='cpu', op='cross_entropy'" in said
    assert "shape=(2,)" in said
    assert "ignored=0.3, label_smoothing=0.1" in said
    with pytest.raises(Wrong, match="loss: error "):
        exec(said, {})
    # Without the fault, and on its own, it finds none.
    subprocess.run(
        [sys.executable, "-c", said], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_a_run_without_failures(capsys):
    assert main([*ALONE, "--seconds", "60", "--calls", "7", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    assert "random calls for 60 s, seed 5" in printed
    assert "\n7 calls, " in printed
    assert " comparisons, 0 failures, seed 5" in printed
    with pytest.raises(SystemExit):
        main(["collective_matmul"])
    assert "no random calls of collective_matmul" in capsys.readouterr().err


def test_a_seed_makes_the_same_calls():
    targets = [(f, "cpu", op) for f in ("torch", "jax") for op in TABLES]

    def first(seed):
        return list(itertools.islice(run.drawn(seed, targets), 30))

    assert first(1) == first(1) != first(2)
    assert {(call["framework"], call["op"]) for call in first(1)} == {(f, op) for f, _, op in targets}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("op", TABLES)
def test_drawn_and_simpler_calls_are_programs(framework, op):
    for call in itertools.islice(run.drawn(0, [(framework, "cpu", op)]), 20):
        assert legal(call) == call
        for other in (call, *simpler(call)):
            compile(program(other), "call", "exec")


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("op", [op for op in TABLES if "vocab" in TABLES[op]])
def test_of_one_class_all_is_exactly_zero(framework, op):
    error, _ = run.attempt(call := simplest(framework, op, vocab=1, shape=(5,)))
    assert error is None
    assert {check.bound for check in run.run(call)} == {0.0}


def test_a_refusal_and_a_warning_are_failures(monkeypatch):
    call = simplest("torch", "cross_entropy")
    assert run.attempt(call) == (None, 2)
    assert isinstance(run.attempt({**call, "scratch": 0.5})[0], ValueError)

    def warns(logits, target, **options):
        warnings.warn("onchip: this is slow", stacklevel=1)

    monkeypatch.setattr(onchip.torch, "cross_entropy", warns)
    assert isinstance(run.attempt(call)[0], UserWarning)


@pytest.mark.parametrize("fault", ["a row of no group", "out", "grad_x", "grad_bias", "grad_row_scale"])
def test_faults_of_grouped_matmul_are_found(monkeypatch, fault):
    forward, gradients = loop.GROUPED.forward, loop.GROUPED.gradients

    def wrong_forward(call):
        made = forward(call)
        if fault == "a row of no group" and call.scatter_rows is None:
            made.out[int(call.groups.sum() if call.which == "group_sizes" else call.groups[-1]) :] = 1e-12
        return made._replace(out=made.out * (1 + 1e-5)) if fault == "out" else made

    def wrong_gradients(*arguments):
        made = zip(("grad_x", "grad_weight", "grad_bias", "grad_row_scale"), gradients(*arguments), strict=True)
        return [x * 1.0001 if x is not None and name == fault else x for name, x in made]

    monkeypatch.setattr(loop.GROUPED, "forward", wrong_forward)
    monkeypatch.setattr(loop.GROUPED, "gradients", wrong_gradients)
    calls = itertools.islice(run.drawn(0, [("torch", "cpu", "grouped_matmul")]), 100)
    assert any(isinstance(run.attempt(call)[0], Wrong) for call in calls)
