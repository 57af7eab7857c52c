"""grouped_matmul in PyTorch on the CPU, by the plain path; grouped_interpreted.py has the kernels."""

from itertools import product

import pytest
import torch
from grouped_common import (
    EVERYTHING,
    FP8,
    NAMES,
    PLAIN,
    SWIGLU,
    assert_equal,
    assert_same,
    leaves,
    oracle,
    problem,
    step,
)
from grouped_contract import CHECKS, On, fp8
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.ops.grouped_matmul.cases import CHECK_CASES, GroupedCase
from onchip.ops.grouped_matmul.checks import CHECKER
from onchip.oracle.torch import DTYPES
from onchip.torch import grouped_matmul
from shared import assert_within_bounds

CPU = On("cpu", "plain")


@pytest.mark.parametrize(("case", "dtype"), list(product(CHECK_CASES, DTYPES)), ids=str)
def test_cases(case, dtype):
    for layout in ("gnk", "gkn"):
        assert_within_bounds(CHECKER.check_case(case, dtype, weight_layout=layout))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract(check):
    check(CPU)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.randoms())
def test_the_order_of_groups_does_not_matter_nor_whether_a_group_is_two(sizes, random):
    """Of groups with the same weight."""
    arguments, grad = problem(GroupedCase("", tuple(sizes), 6, 5))
    made = step(arguments, grad)
    order = random.sample(range(len(sizes)), len(sizes))
    of_rows = torch.cat([torch.arange(sum(sizes[:g]), sum(sizes[: g + 1])) for g in order])
    permuted = {"x": arguments["x"][of_rows], "weight": arguments["weight"][order]}
    permuted = {name: x.detach().requires_grad_() for name, x in permuted.items()}
    permuted["group_sizes"] = arguments["group_sizes"][order]
    other = step(permuted, grad[of_rows])
    for name in ("out", "grad_x"):
        assert_same({name: other[name]}, {name: made[name][of_rows]})
    assert_same({"w": other["grad_weight"]}, {"w": made["grad_weight"][order]})

    g = random.randrange(len(sizes))
    part = random.randint(0, sizes[g])
    twice = {"x": arguments["x"], "weight": arguments["weight"][[*range(g + 1), *range(g, len(sizes))]]}
    twice["weight"] = twice["weight"].detach().requires_grad_()
    twice["group_sizes"] = torch.tensor([*sizes[:g], part, sizes[g] - part, *sizes[g + 1 :]])
    other = step(twice, grad)
    both = other["grad_weight"][g] + other["grad_weight"][g + 1]
    assert_same({"out": other["out"], "grad_x": other["grad_x"], "w": both},
                {"out": made["out"], "grad_x": made["grad_x"], "w": made["grad_weight"][g]})  # fmt: skip


@pytest.mark.parametrize("needs", list(product((0, 1), repeat=4)), ids=str)
def test_what_needs_no_gradient_gets_none(needs):
    arguments, grad = problem()
    for name, need in zip(NAMES, needs, strict=True):
        arguments[name].requires_grad_(bool(need))
    if not any(needs):
        assert not grouped_matmul(**arguments).requires_grad
    else:
        assert_same(step(arguments, grad), oracle(arguments, grad))


def test_autocast_decides_the_products_dtype_alone():
    """A float32 weight's gradient is never rounded to bfloat16 on the way."""
    arguments, grad = problem(PLAIN)
    arguments["x"] = arguments["x"].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        made = step(arguments, grad.bfloat16())
    assert made["out"].dtype == made["grad_x"].dtype == torch.bfloat16
    assert made["grad_weight"].dtype == torch.float32
    arguments["weight"] = arguments["weight"].detach().bfloat16().requires_grad_()
    right = oracle(arguments, grad.bfloat16())
    assert_same({"grad_weight": made.pop("grad_weight")}, right, 1e-6)
    assert_same(made, right, 4e-3)


@pytest.mark.parametrize("layout", ["gnk", "gkn"])
@pytest.mark.parametrize("case", [FP8, EVERYTHING], ids=str)
def test_fp8(case, layout):
    """The noise, of sums long enough, is as low as fp8_linear's."""
    for dtype in (torch.bfloat16, torch.float32):
        arguments, grad, made = fp8(CPU, layout, case, dtype if case is FP8 else torch.float32)
    if case is FP8:
        assert_same(made, oracle(arguments, grad), 10 ** (-28 / 20))


@pytest.mark.parametrize("options", [{}, {"everything": True}], ids=str)
def test_compiled_in_one_graph(options):
    """With sizes that change from call to call."""
    arguments, grad = problem(EVERYTHING if options else PLAIN)
    compiled = torch.compile(grouped_matmul, fullgraph=True, backend="aot_eager")
    expected = step(arguments, grad)
    out = compiled(**arguments)
    grads = torch.autograd.grad(out, list(leaves(arguments).values()), grad)
    assert_equal({"out": out} | dict(zip(list(expected)[1:], grads, strict=True)), expected)
    arguments["group_sizes"] = arguments["group_sizes"].flip(0)
    assert torch.equal(compiled(**arguments), grouped_matmul(**arguments))


def test_what_is_kept_is_as_it_says():
    """Without an activation and a row scale's gradient no product; of a frozen weight no x."""
    arguments, _ = problem(PLAIN)

    def kept(**more):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(tuple(x.shape)) or x, lambda x: x):
            grouped_matmul(**arguments, **more)
        return found

    product = (PLAIN.tokens, PLAIN.n)
    assert product not in kept()
    assert product in kept(**SWIGLU)
    assert product in kept(row_scale=torch.rand(PLAIN.tokens, requires_grad=True))
    assert (PLAIN.tokens, PLAIN.k) in kept()
    arguments["weight"].requires_grad_(False)
    assert (PLAIN.tokens, PLAIN.k) not in kept()
