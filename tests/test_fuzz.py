"""`python -m fuzz`: random calls are legal, judged, simplified, and printed as programs that fail in the same way."""

import functools
import warnings

import pytest
from hypothesis import HealthCheck, given, seed, settings

import onchip.torch
from fuzz.__main__ import SHARES, attempt, main
from fuzz.call import program, run
from fuzz.draw import TABLES, calls, legal, table
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


def test_a_fault_is_found_shrunk_and_printed(faulty, capsys, monkeypatch):
    assert main([*ALONE, "--seed", "1"]) == 1
    printed = capsys.readouterr().out
    assert "a call fails: Wrong: " in printed
    said = printed[printed.index("from fuzz") :]
    assert "device='cpu', op='cross_entropy'" in said
    assert "shape=(2,)" in said
    assert "ignored=0.3, label_smoothing=0.1" in said
    with pytest.raises(Wrong, match="loss: error "):
        exec(said, {})
    monkeypatch.undo()
    exec(said, {})  # without the fault it finds none


def test_a_run_without_failures(capsys):
    assert main([*ALONE, "--seconds", "60", "--calls", "7", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    assert "random calls for 60 s, seed 5" in printed
    assert "\n7 calls, " in printed
    assert " comparisons, 0 failures, seed 5" in printed
    with pytest.raises(SystemExit):
        main(["collective_matmul"])
    assert "no random calls of collective_matmul" in capsys.readouterr().err


def drawn(of, number, *targets):
    """The first calls of a seed."""
    made = []
    how = settings(max_examples=number, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    seed(of)(how(given(calls(targets))(lambda call: made.append(call))))()
    return made[:number]


@pytest.mark.parametrize("framework", SHARES)
@pytest.mark.parametrize("op", TABLES)
def test_drawn_calls_are_the_same_ones_legal_and_programs(framework, op):
    target = framework, "cpu", op
    made = drawn(1, 8, target)
    assert made == drawn(1, 8, target) != drawn(2, 8, target)
    for call in made:
        assert legal(call) == call
        compile(program(call), "call", "exec")


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("op", [op for op in TABLES if "vocab" in TABLES[op]])
def test_of_one_class_all_is_exactly_zero(framework, op):
    assert {check.bound for check in run(simplest(framework, op, vocab=1, shape=(5,)))} == {0.0}


def test_a_refusal_and_a_warning_are_failures(monkeypatch):
    call = simplest("torch", "cross_entropy")
    assert attempt(call) == 2
    with pytest.raises(ValueError, match="too small"):
        attempt({**call, "scratch": 0.5})

    def warns(logits, target, **options):
        warnings.warn("onchip: this is slow", stacklevel=1)

    monkeypatch.setattr(onchip.torch, "cross_entropy", warns)
    with pytest.raises(UserWarning, match="this is slow"):
        attempt(call)


@pytest.fixture(scope="module")
def calls_of_groups():
    return drawn(0, 100, ("torch", "cpu", "grouped_matmul"))


@pytest.mark.parametrize("fault", ["a row of no group", "out", "grad_x", "grad_bias", "grad_row_scale"])
def test_faults_of_grouped_matmul_are_found(monkeypatch, fault, calls_of_groups):
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
    with pytest.raises(Wrong):
        list(map(attempt, calls_of_groups))
