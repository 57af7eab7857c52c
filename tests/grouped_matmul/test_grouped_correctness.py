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
    assert_rows_past_the_last_group_are_not_read,
    assert_same,
    fp8_oracle,
    leaves,
    oracle,
    problem,
    step,
    strided,
    turned,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from every_loss import Recorded
from onchip.ops.grouped_matmul.cases import CHECK_CASES, Case
from onchip.ops.grouped_matmul.checks import CHECKER
from onchip.oracle.torch import DTYPES
from onchip.torch import grouped_matmul
from shared import assert_within_bounds


@pytest.mark.parametrize(("case", "dtype"), list(product(CHECK_CASES, DTYPES)), ids=str)
def test_cases(case, dtype):
    for layout in ("gnk", "gkn"):
        assert_within_bounds(CHECKER.check_case(case, dtype, weight_layout=layout))


@pytest.mark.parametrize("case", [PLAIN, EVERYTHING], ids=str)
def test_float64(case):
    arguments, grad = problem(case, torch.float64)
    assert_same(step(arguments, grad), oracle(arguments, grad), 1e-14)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_are_sizes_summed_up(dtype):
    arguments, grad = problem()
    expected = step(arguments, grad)
    sizes = arguments.pop("group_sizes")
    assert_equal(step(arguments | {"group_offsets": sizes.cumsum(0).to(dtype)}, grad), expected)
    for name in ("rows", "scatter_rows"):
        arguments[name] = arguments[name].to(dtype)
    assert_equal(step(arguments | {"group_sizes": sizes.to(dtype)}, grad), expected)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.randoms())
def test_the_order_of_groups_does_not_matter_nor_whether_a_group_is_two(sizes, random):
    """Of groups with the same weight."""
    arguments, grad = problem(Case("", tuple(sizes), 6, 5))
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


def test_rows_past_the_last_group_are_not_read():
    assert_rows_past_the_last_group_are_not_read()


def test_a_nan_stays_in_its_group():
    arguments, grad = problem(PLAIN)
    with torch.no_grad():
        arguments["x"][30] = torch.nan  # in the last group
    made = step(arguments, grad)
    assert made["out"][30].isnan().all()
    assert made["grad_weight"][2].isnan().all()
    rest = [made["out"][:30], made["out"][31:], made["grad_weight"][:2], made["grad_x"]]
    assert all(x.isfinite().all() for x in rest)


@pytest.mark.parametrize("needs", list(product((0, 1), repeat=4)), ids=str)
def test_what_needs_no_gradient_gets_none(needs):
    arguments, grad = problem()
    for name, need in zip(NAMES, needs, strict=True):
        arguments[name].requires_grad_(bool(need))
    if not any(needs):
        assert not grouped_matmul(**arguments).requires_grad
    else:
        assert_same(step(arguments, grad), oracle(arguments, grad))


@pytest.mark.parametrize("layout", ["gnk", "gkn"])
def test_weight_grad_out_is_the_sum_over_micro_batches(layout):
    total, expected = None, 0.5
    for seed in (0, 1, 2):
        arguments, grad = problem(dtype=torch.bfloat16, seed=seed)
        arguments["weight"] = problem(dtype=torch.bfloat16)[0]["weight"]
        if layout == "gkn":
            arguments = turned(arguments)
        total = torch.full(arguments["weight"].shape, 0.5) if total is None else total
        grouped_matmul(**arguments, weight_grad_out=total).backward(grad)
        assert arguments["weight"].grad is None
        expected = expected + oracle(arguments, grad).grad_weight
    assert_same({"total": total}, {"total": expected}, 3e-3)  # the kept product is bfloat16


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
    """Each group is fp8_linear's; the noise, of sums long enough, is as low as there."""
    arguments, grad = problem(case)
    if layout == "gkn":
        arguments = turned(arguments)
    made = step(arguments, grad, precision="fp8")
    assert_same(made, fp8_oracle(arguments, grad))
    assert_equal(step(arguments, grad, precision="fp8"), made)
    if case is FP8:
        assert_same(made, oracle(arguments, grad), 10 ** (-28 / 20))
    arguments, grad = problem(FP8, torch.bfloat16)
    assert_same(step(arguments, grad, precision="fp8"), fp8_oracle(arguments, grad), 2**-8)


def test_fp8_into_weight_grad_out():
    arguments, grad = problem(FP8, torch.bfloat16)
    total = torch.full(arguments["weight"].shape, 0.5)
    for _ in range(2):
        grouped_matmul(**arguments, precision="fp8", weight_grad_out=total).backward(grad)
    assert_same({"grad_weight": (total - 0.5) / 2}, fp8_oracle(arguments, grad), 1e-6)


def test_any_strides_and_the_same_bits_every_time():
    arguments, grad = problem(EVERYTHING)
    expected = step(arguments, grad)
    assert_equal(step(arguments, grad), expected)

    for name in ("x", "weight", "bias"):
        arguments[name] = strided(arguments[name])
    assert_same(step(arguments, strided(grad)), expected, 1e-6)


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


def test_the_registered_operator_makes_the_same():
    for case in (PLAIN, EVERYTHING):
        arguments, grad = problem(case)
        expected = step(arguments, grad)
        with Recorded() as recorded:
            made = step(arguments, grad)
        assert any("grouped_matmul" in str(x) for x in recorded.calls), recorded.calls
        assert_equal(made, expected)


def test_meta_tensors_have_the_results_shape():
    arguments, _ = problem(EVERYTHING)
    there = {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
    assert grouped_matmul(**there).shape == (14, 12)


@pytest.mark.parametrize("second", NAMES)
@pytest.mark.parametrize("first", NAMES)
def test_differentiated_twice(first, second):
    arguments, _ = problem(EVERYTHING)
    out = grouped_matmul(**arguments)
    (g,) = torch.autograd.grad(out.square().sum(), arguments[first], create_graph=True)
    with pytest.raises(RuntimeError, match="grouped_matmul: a backward of the backward is not supported"):
        torch.autograd.grad(g.square().sum() + out.sum(), arguments[second])


def test_a_graph_may_be_used_twice():
    arguments, grad = problem(EVERYTHING)
    out = grouped_matmul(**arguments)
    first, second = (torch.autograd.grad(out, arguments["x"], grad, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *second)


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
