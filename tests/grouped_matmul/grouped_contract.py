"""Checks that hold for every backend of grouped_matmul in PyTorch: on the CPU, under Triton's interpreter and on a
GPU.
"""

from dataclasses import dataclass

import pytest
import torch
from grouped_common import (
    EVERYTHING,
    FP8,
    FP8_EVERYTHING,
    NAMES,
    PLAIN,
    assert_equal,
    assert_rows_past_the_last_group_are_not_read,
    assert_same,
    fp8_oracle,
    oracle,
    problem,
    step,
    strided,
    turned,
)

from onchip.ops.grouped_matmul.cases import GroupedCase
from onchip.torch import grouped_matmul

CHECKS = {}


@dataclass(frozen=True)
class On:
    """Where a check runs, by which backend, and how near float32 sums in another order are."""

    device: str
    backend: str
    whole: GroupedCase = EVERYTHING
    dtype: torch.dtype = torch.float32
    near: float = 1e-6

    def problem(self, case, dtype=torch.float32, layout="gnk", seed=0):
        arguments, grad = problem(case, dtype, self.device, seed)
        return (turned(arguments) if layout == "gkn" else arguments), grad

    def step(self, arguments, grad, **more):
        return step(arguments, grad, backend=self.backend, **more)


def check(f):
    CHECKS[f.__name__] = f
    return f


@check
def the_same_bits_of_any_integers(on):
    """Every time, of offsets, which are sizes summed up, and of indices of 32 and of 64 bits."""
    arguments, grad = on.problem(on.whole, on.dtype)
    expected = on.step(arguments, grad)
    assert_equal(on.step(arguments, grad), expected)
    sizes = arguments.pop("group_sizes")
    assert_equal(on.step(arguments | {"group_offsets": sizes.cumsum(0).int()}, grad), expected)
    wide = {name: arguments[name].long() for name in ("rows", "scatter_rows")}
    assert_equal(on.step(arguments | wide | {"group_offsets": sizes.long().cumsum(0)}, grad), expected)


@check
def any_strides(on):
    arguments, grad = on.problem(on.whole, on.dtype)
    expected = on.step(arguments, grad)
    for name in ("x", "weight", "bias", "row_scale"):
        arguments[name] = strided(arguments[name])
    arguments["rows"] = arguments["rows"].repeat_interleave(2)[::2]
    assert_same(on.step(arguments, strided(grad)), expected, on.near)
    arguments, _ = on.problem(PLAIN)
    grad = torch.randn(1, device=on.device).expand(PLAIN.tokens, PLAIN.n)
    assert_same(on.step(arguments, grad), oracle(arguments, grad))


@check
def some_gradients(on):
    arguments, grad = on.problem(EVERYTHING)
    for needed in (("x",), ("row_scale",), ("weight", "bias")):
        for name in NAMES:
            arguments[name].requires_grad_(name in needed)
        assert_same(on.step(arguments, grad), oracle(arguments, grad))


@check
def weight_grad_out(on):
    """The sum over micro-batches, in float32 whatever the inputs' dtype is."""
    for layout in ("gnk", "gkn"):
        for options, bound in (({}, 1e-5), ({"precision": "fp8"}, 1e-3 if on.device == "cpu" else 5e-3)):
            case, total, expected = FP8 if options else PLAIN, None, 0.5
            weight = on.problem(case, torch.float16, layout)[0]["weight"]
            for seed in (0, 1):
                arguments, grad = on.problem(case, torch.float16, layout, seed)
                arguments["weight"] = weight
                total = torch.full_like(weight, 0.5, dtype=torch.float32) if total is None else total
                grouped_matmul(**arguments, **options, backend=on.backend, weight_grad_out=total).backward(grad)
                expected = expected + (fp8_oracle if options else oracle)(arguments, grad).grad_weight
            assert weight.grad is None
            assert_same({"total": total.detach()}, {"total": expected}, bound)


@check
def rows_past_the_last_group(on):
    assert_rows_past_the_last_group_are_not_read(on.device, backend=on.backend)


@check
def a_nan_stays_in_its_group(on):
    """The blocks that the weights' gradients are sums over reach into the next group."""
    arguments, grad = on.problem(PLAIN)
    with torch.no_grad():
        arguments["x"][20] = torch.nan  # the first of the last group
        grad[19] = torch.nan  # the last of the first
    made = on.step(arguments, grad)
    assert made["out"][20].isnan().all()
    assert made["grad_weight"][[0, 2]].isnan().all()
    assert not made["grad_weight"][1].any()
    assert made["grad_x"][19].isnan().all()
    rest = torch.arange(PLAIN.tokens)
    assert made["out"][rest != 20].isfinite().all()
    assert made["grad_x"][rest != 19].isfinite().all()


@check
def fp8_of_some_gradients(on):
    arguments, grad = on.problem(FP8_EVERYTHING)
    expected = fp8_oracle(arguments, grad)
    for needed in (("x",), ("weight", "row_scale")):
        for name in NAMES:
            arguments[name].requires_grad_(name in needed)
        assert_same(on.step(arguments, grad, precision="fp8"), expected, 10 * on.near)


@check
def differentiated_twice(on):
    arguments, grad = on.problem(EVERYTHING)
    for first in ("x", "weight"):
        out = grouped_matmul(**arguments, backend=on.backend)
        (g,) = torch.autograd.grad(out, arguments[first], grad, create_graph=True)
        for second in NAMES if on.backend == "plain" else ("weight",):
            with pytest.raises(RuntimeError, match="grouped_matmul: a backward of the backward is not supported"):
                torch.autograd.grad(g.square().sum() + out.sum(), arguments[second], retain_graph=True)


def fp8(on, layout, case, dtype):
    """Each group is fp8_linear's."""
    arguments, grad = on.problem(case, dtype, "gkn" if layout == "gkn" else "gnk")
    if layout == "interleaved" and "activation" in arguments:
        arguments["gate_up"] = layout
    made = on.step(arguments, grad, precision="fp8")
    assert_same(made, fp8_oracle(arguments, grad), {torch.float32: 1e-5, torch.float16: 1e-3}.get(dtype, 2**-8))
    return arguments, grad, made
