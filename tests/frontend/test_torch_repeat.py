"""Prepared calls of a toy op on the CPU; test_prepared_gpu.py has the ops."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from onchip.frontend import torch_builder, torch_prepared, torch_repeat
from onchip.frontend.torch_prepared import call as stated
from onchip.frontend.torch_register import Operator, needed
from onchip.frontend.torch_repeat import repeatable


class Call(NamedTuple):
    x: Tensor
    y: Tensor | None
    memory: Tensor | None
    factor: float
    grads: tuple[bool, ...]


class Outputs(NamedTuple):
    out: Tensor
    more: Tensor


class Kept(NamedTuple):
    x: Tensor
    y: Tensor | None
    out: Tensor
    memory: Tensor | None
    factor: float


class Result(NamedTuple):
    out: Tensor
    given: Tensor
    twice: Tensor
    factor: float


ran: list[str] = []


def _forward(call):
    ran.append("forward")
    out = stated(torch.mul, call.x if call.y is None else stated(torch.mul, call.x, call.y), call.factor)
    return Outputs(out, stated(torch.add, out, 1))


_forward.__annotations__ = {"call": Call, "return": Outputs}


def _save(call: Call, outputs: Outputs) -> Kept:
    return Kept(call.x.detach(), call.y, outputs.out, call.memory, call.factor)


def _gradients(kept, upstream, wanted):
    ran.append("gradients")
    g = stated(torch.mul, upstream[0], kept.factor)
    by_y = None
    if wanted[1]:
        by_y = stated(torch.mul, g, kept.x)
        if kept.memory is not None:
            stated(Tensor.add_, kept.memory, by_y)
            by_y = None
    return (g if kept.y is None else stated(torch.mul, g, kept.y)) if wanted[0] else None, by_y


OP = Operator(
    "test_repeat",
    op="toy",
    forward=_forward,
    fake=_forward,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: [torch.empty_like(kept.x) if w else None for w in wanted],
    differentiable=("x", "y"),
    adds_to={"y": "memory"},
    states=True,
)


@repeatable
def toy(x, y=None, *, factor=2.0, memory=None, way="plain", check_inputs=False):
    ran.append("checks")
    if way == "copy":
        x = x * 1
    if way == "value":
        torch_prepared.refuse("a value is read")
        if x.sum() == 0:
            return x
    made = OP(Call(x, y, memory, float(factor), needed(x, y)))
    if way == "in place":
        made.more.add_(1)
    if way == "after":
        return stated(torch.mul, made.out, 2)
    if way == "two":
        return OP(Call(made.out, y, memory, float(factor), needed(made.out, y))).out
    return Result(made.out, x, stated(torch.mul, made.more, 2), factor) if way == "result" else made.out


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch_prepared, "is_prepared", lambda x: True)
    monkeypatch.setattr(torch_builder, "ALIGNED", 64)  # as memory of the CPU's is
    torch_prepared.forget()
    ran.clear()


def _tensors(seed, *, y=True):
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(3, 4, generator=g, requires_grad=True) for _ in range(2)]
    return made if y else [made[0], None]


def _step(x, y, **options):
    out = toy(x, y, **options)
    grads = torch.autograd.grad(out, [a for a in (x, y) if a is not None], torch.full_like(out, 3), allow_unused=True)
    return [out.detach(), *grads]


def _expected(x, y, factor=2.0):
    out = x * factor if y is None else x * y * factor
    return [out.detach(), *torch.autograd.grad(out, [a for a in (x, y) if a is not None], torch.full_like(out, 3))]


@pytest.mark.parametrize("y", [True, False])
def test_the_third_call_does_no_more_than_was_stated(y):
    for seed in range(4):
        ran.clear()
        x, other = _tensors(seed, y=y)
        for made, expected in zip(_step(x, other), _expected(x, other), strict=True):
            assert torch.equal(made, expected)
        assert ran == (["checks", "forward", "gradients"] if seed < 2 else [])


def test_results_of_several_parts():
    for seed in range(4):
        ran.clear()
        x, y = _tensors(seed)
        made = toy(x, y, way="result", factor=3)
        assert type(made) is Result
        assert made.given is x
        assert made.factor == 3
        assert torch.equal(made.twice, 2 * (x * y * 3 + 1))
        assert made.out.requires_grad
        assert not made.twice.requires_grad
        assert bool(ran) == (seed < 2)


def test_kinds_of_calls(monkeypatch):
    x, y = _tensors(0)
    calls = [
        lambda: toy(x, y),
        lambda: toy(x, y=y),
        lambda: toy(x, y, factor=1),
        lambda: toy(x, y, factor=1.0),
        lambda: toy(x, y, factor=True),
        lambda: toy(x.detach(), y),
        lambda: toy(x, y.detach()),
        lambda: toy(x[:2], y[:2]),
        lambda: toy(x.T, y.T),
        lambda: toy(x.double(), y),
        lambda: toy(x, x),
        lambda: toy(x, None),
    ]
    for function in calls:  # none does what another stated
        for times in range(3):
            ran.clear()
            function()
            assert bool(ran) == (times < 2)
    with torch.no_grad():
        for times in range(3):
            ran.clear()
            assert not toy(x, y).requires_grad
            assert bool(ran) == (times < 2)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cuda": device == "cuda")
    for times in range(3):
        ran.clear()
        toy(x, y)
        assert bool(ran) == (times < 2)


@pytest.mark.parametrize("way", ["copy", "value", "in place", "after", "two", "checks"])
def test_what_is_not_prepared(way):
    x, y = _tensors(0)
    first = None
    options = {"check_inputs": True} if way == "checks" else {"way": way}
    for _ in range(4):
        ran.clear()
        made = _step(x, y, **options)
        assert "checks" in ran
        first = first or made
        for a, b in zip(made, first, strict=True):
            assert torch.equal(a, b)


def test_nothing_is_repeated_where_operators_are_watched():
    x, y = _tensors(0)

    def calls():
        ran.clear()
        toy(x, y)
        return "checks" in ran

    assert [calls() for _ in range(3)] == [True, True, False]
    with FlopCounterMode(display=False):
        assert calls()
    with torch.autograd.forward_ad.dual_level():
        assert calls()
    ran.clear()
    torch.func.vmap(lambda a: a + torch.zeros(()).sum())(x.detach())
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda a: toy(a, y).sum())(x.detach())
    escaped = []
    torch.func.vmap(lambda a: escaped.append(a) or a)(x.detach())
    assert torch_repeat._kind((escaped[0], y), {}, []) is None
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b: toy(a, b), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert torch.equal(compiled(x, y), x * y * 2)
    assert not calls()


def test_arguments_that_are_no_plain_values_are_never_remembered():
    x, y = _tensors(0)
    for _ in range(3):
        ran.clear()
        with pytest.raises(TypeError):
            toy(x, y, factor=[2.0])
        assert ran == ["checks"]
    sparse = torch.eye(3).to_sparse()
    assert torch_repeat._kind((sparse,), {}, []) is None
    pair = Outputs(x, y)
    given = []
    assert torch_repeat._kind((pair, "word"), {"n": None}, given) is not None
    assert given == [x, y]
    kinds = [torch_repeat._kind(args, {}, []) for args in (((x,), y), ((x, y),), (x, y), ((x,), (y,)))]
    assert len({*kinds}) == len(kinds)


def test_an_output_that_was_changed_in_place_is_noticed():
    x, y = _tensors(0)
    for _ in range(4):
        out = toy(x, y)
        out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    for _ in range(2):
        out = toy(x, y)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_memory_of_the_callers_and_a_kept_graph():
    x, y = _tensors(0)
    memory = torch.zeros(3, 4)
    for times in range(1, 5):
        out = toy(x, y, memory=memory)
        (by_x,) = torch.autograd.grad(out.sum(), [x], retain_graph=True)
        assert torch.equal(by_x, 2 * y)
        version = memory._version
        assert torch.autograd.grad(out.sum(), [y], allow_unused=True) == (None,)
        assert memory._version > version
        torch.testing.assert_close(memory, 2 * x.detach() * times)


def test_differentiated_twice():
    x, y = _tensors(0)
    for _ in range(4):
        (g,) = torch.autograd.grad(toy(x, y).sum(), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="backward of the backward"):
            g.sum().backward()


def test_inference_mode():
    x, y = (a.detach() for a in _tensors(0))
    with torch.inference_mode():
        for times in range(4):
            ran.clear()
            assert toy(x, y).is_inference()
            assert bool(ran) == (times < 2)
    assert not toy(x, y).is_inference()


@repeatable
def mean(x, *, normalizer=None):
    ran.append(f"checks of {type(normalizer).__name__}")
    made = OP(Call(x, None, None, 1.0, needed(x, None)))
    divisor = torch.tensor(float(normalizer)) if isinstance(normalizer, int | float) else normalizer
    return stated(torch.div, stated(torch.sum, made.out.detach()), divisor)


def test_a_normalizer_may_be_another_in_each_call():
    (x, _), log = _tensors(0, y=False), []
    for normalizer in (2, 3.0, 4, 5):
        ran.clear()
        assert torch.equal(mean(x, normalizer=normalizer), x.detach().sum() / normalizer)
        log.append(ran.copy())
    assert log == [["checks of Tensor", "forward"]] * 2 + [[], []]
    for wrong in (-1, 0.0, float("inf"), float("nan")):  # for the function to refuse
        ran.clear()
        mean(x, normalizer=wrong)
        assert ran == [f"checks of {type(wrong).__name__}", "forward"]
