"""Registration of an op: a toy op, x * y * factor + shift, through both of its ways."""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from onchip.frontend import torch_flops
from onchip.frontend.torch_inputs import is_dtensor
from onchip.frontend.torch_register import Operator, needed
from onchip.torch import cross_entropy


@dataclass(frozen=True)
class Options:
    factor: float | None
    name: str
    sizes: tuple[int, ...]
    square: bool
    budget: int | None


class Call(NamedTuple):
    x: Tensor
    label: Tensor | None
    y: Tensor
    memory: Tensor | None
    dtype: torch.dtype
    options: Options
    grads: tuple[bool, ...]


class Outputs(NamedTuple):
    out: Tensor
    total: Tensor
    extra: Tensor | None
    kept_memory: Tensor


class Kept(NamedTuple):
    x: Tensor
    y: Tensor
    memory: Tensor | None
    kept_memory: Tensor
    options: Options


seen: list[tuple[str, object]] = []


def _forward(call: Call) -> Outputs:
    seen.append(("forward", call.options))
    assert not torch.is_autocast_enabled("cpu")
    out = call.x * call.y * (call.options.factor or 1.0)
    out = out.to(call.dtype).reshape(-1).view(call.x.shape)
    return Outputs(out, out.sum(), call.x + 1 if call.options.square else None, call.x * 1)


def _fake(call: Call) -> Outputs:
    def like(x: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=call.dtype)

    return Outputs(
        like(call.x),
        call.x.new_empty((), dtype=call.dtype),
        like(call.x) if call.options.square else None,
        like(call.x),
    )


def _save(call: Call, outputs: Outputs) -> Kept:
    return Kept(call.x, call.y, call.memory, outputs.kept_memory, call.options)


def _upstream(kept, upstream):
    g = torch.zeros_like(kept.x) if upstream[0] is None else upstream[0]
    return (g if upstream[1] is None else g + upstream[1]) * (kept.options.factor or 1.0)


def _gradients(kept, upstream, wanted):
    seen.append(("gradients", tuple(wanted)))
    g = _upstream(kept, upstream)
    to_y = None
    if wanted[1]:
        to_y = g * kept.kept_memory
        if kept.memory is not None:
            kept.memory.add_(to_y)
            to_y = None
    kept.kept_memory.copy_(g * kept.y)  # x's gradient, in place
    return None, to_y


def _fake_gradients(kept, upstream, wanted):
    return None, torch.empty_like(kept.y) if wanted[1] and kept.memory is None else None


def _collect(kept, made, wanted):
    return kept.kept_memory, made[1]


OP = Operator(
    "test_register",
    op="toy",
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("x", "y"),
    differentiable_outputs=2,
    consumed=("kept_memory",),
    adds_to={"y": "memory"},
    collect=_collect,
)
OPTIONS = Options(2.0, "word", (3, 4), False, None)


def call(x, y, memory=None, options=OPTIONS):
    made = OP(Call(x, None, y, memory, torch.float32, options, needed(x, y)))
    return made._replace(kept_memory=None)  # backward uses it up: no caller has it


def tensors():
    torch.manual_seed(0)
    return [torch.randn(3, 4, requires_grad=True) for _ in range(2)]


WAYS = ("plain", "watched")


def run(way, *args, **kwargs):
    if way == "plain":
        return call(*args, **kwargs)
    if way == "watched":
        with FlopCounterMode(display=False):
            return call(*args, **kwargs)
    torch.compiler.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")(*args, **kwargs)


@pytest.mark.parametrize(("way", "factor"), [("plain", None), ("plain", 2.0), ("watched", 2.0), ("compiled", None)])
def test_outputs_and_gradients(way, factor):
    x, y = tensors()
    options = Options(factor, "word", (), True, 7)
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(way, x, y, options=options)
    assert isinstance(out, Outputs)
    torch.testing.assert_close(out.out, x * y * (factor or 1))
    torch.testing.assert_close(out.extra, x + 1)
    assert [entry for entry in seen if entry[0] == "forward"] == [("forward", options)]
    assert not out.extra.requires_grad
    (out.out.sum() + 3 * out.total).backward()
    torch.testing.assert_close(x.grad, 4 * (factor or 1) * y.detach())
    torch.testing.assert_close(y.grad, 4 * (factor or 1) * x.detach())


@pytest.mark.parametrize("way", WAYS)
def test_a_retained_graph_keeps_what_is_consumed(way):
    x, y = tensors()
    out = run(way, x, y).total
    for retain in (True, True, False):
        x.grad = y.grad = None
        out.backward(retain_graph=retain)
        torch.testing.assert_close(x.grad, 2 * y.detach())
        torch.testing.assert_close(y.grad, 2 * x.detach())


@pytest.mark.parametrize("way", WAYS)
def test_only_what_is_asked_for(way):
    x, y = tensors()
    total = run(way, x, y).total
    seen.clear()
    torch.autograd.grad(total, x)
    assert seen == [("gradients", (True, False))]


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_the_callers_is_added_to(way):
    x, y = tensors()
    memory = torch.ones(3, 4)
    outs = [run(way, x, y, memory).total for _ in range(2)]
    version = memory._version
    for out in outs:  # the second after the first has changed the memory
        out.backward()
    torch.testing.assert_close(memory, 1 + 4 * x.detach())
    assert y.grad is None
    assert memory._version > version


@pytest.mark.parametrize("way", WAYS)
def test_an_output_may_be_changed_in_place_and_differentiated_once(way):
    x, y = tensors()
    out = run(way, x, y).out
    out /= 2
    out.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())
    total = run(way, x, y).total
    (g,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match="toy: a backward of the backward is not supported"):
        g.sum().backward()


@pytest.mark.parametrize("name", ["torch.distributed.tensor", "torch.utils.flop_counter"])
def test_modules_that_another_thread_is_importing(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # without what it will have
    assert not is_dtensor(torch.ones(1))
    assert not torch_flops.are_counted()
    torch_flops.tell_counters()


def test_hooks_that_copy_expanded_tensors():
    """They need not give back a caller's strides, which nothing could be written to."""
    logits, target = torch.randn(1, 50, requires_grad=True), torch.randint(50, (4,))
    (expected,) = torch.autograd.grad(cross_entropy(logits.expand(4, 50), target), logits)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)
    ):
        loss = cross_entropy(logits.expand(4, 50), target)
    (made,) = torch.autograd.grad(loss, logits)
    assert torch.equal(made, expected)
