"""The Triton kernels of grouped_matmul under Triton's interpreter, on the CPU: what test_interpreted.py starts.

Triton reads TRITON_INTERPRET when it is imported, so these checks need a process of their own.  Memory that nobody has
written is NaN, so a result that depends on it is NaN too.

    TRITON_INTERPRET=1 python grouped_interpreted.py NAME ...     prints a line of JSON for each check
"""

import sys
from unittest import mock

import torch
from grouped_common import (
    EVERYTHING,
    FP8,
    FP8_EVERYTHING,
    PLAIN,
    WRONG_SIZES,
    assert_equal,
    assert_nan,
    assert_nan_from_the_first_wrong_group_on,
    problem,
)
from grouped_contract import CHECKS as CONTRACT
from grouped_contract import On
from grouped_contract import fp8 as fp8_products
from torch.utils._python_dispatch import TorchDispatchMode

from interpreter import main, registering
from onchip.groups.triton import op
from onchip.kernels.triton.launch import Device
from onchip.ops.grouped_matmul.cases import CHECK_CASES, SWIGLU, GroupedCase
from onchip.ops.grouped_matmul.checks import CHECKER
from onchip.torch import grouped_matmul
from shared import assert_within_bounds

CHECKS = {}
check = registering(CHECKS)
DTYPES = (torch.float32, torch.float16)
CASES = {case.name: (case, i % 2) for i, case in enumerate(CHECK_CASES)}
# All rows by descriptors, with columns that fill tiles of gate and up, and some that don't.
WIDE = GroupedCase("wide", (130, 3), 512, 72, row_scale=True, options=SWIGLU)


INTERPRETED = On("cpu", "triton")
kernels = INTERPRETED.step


@check(*CASES)
def case(name):
    """In one of both dtypes and layouts; the next case in the others."""
    problem, i = CASES[name]
    layout = ("gnk", "gkn")[i]
    assert_within_bounds(CHECKER.check_case(problem, DTYPES[i], backend="triton", weight_layout=layout))


@check(0, 1)
def wide(i):
    assert_within_bounds(CHECKER.check_case(WIDE, DTYPES[i], backend="triton", weight_layout=("gkn", "gnk")[i]))


@check()
def pointers():
    """As on a GPU without descriptors."""
    from onchip.groups.triton import launches

    with mock.patch.object(launches, "describe", return_value=Device(80, 3, 101376)):
        for problem in (EVERYTHING, PLAIN):
            assert_within_bounds(CHECKER.check_case(problem, torch.float16, backend="triton"))


@check(*CONTRACT)
def contract(name):
    CONTRACT[name](INTERPRETED)


class Watched(TorchDispatchMode):
    """While it watches, registered operators are called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@check()
def registered():
    for case in (EVERYTHING, PLAIN):
        arguments, grad = problem(case)
        expected = kernels(arguments, grad)
        with Watched():
            assert_equal(kernels(arguments, grad), expected)


WRONG = {"rows below": -1, "rows above": 12, "scatter_rows below": -(2**31), "scatter_rows above": 14}


@check(*WRONG)
def wrong(name):
    """As on a GPU, where nothing can be raised: all results are NaN, and nothing outside of them is touched."""
    arguments, grad = problem()
    arguments[name.split()[0]][29] = WRONG[name]
    with mock.patch.object(op, "check"):
        assert_nan(kernels(arguments, grad))


@check(*WRONG_SIZES)
def wrong_sizes(name):
    with mock.patch.object(op, "check"):
        assert_nan_from_the_first_wrong_group_on(*WRONG_SIZES[name], backend="triton")


@check("gnk", "gkn", "interleaved", "pointers")
def fp8(how):
    """By descriptors and by pointers, each with the plain product and with all that surrounds one."""
    from onchip.groups.triton import launches

    device = Device(89, 3, 101376) if how == "pointers" else Device(90, 4, 232448)
    with mock.patch.object(launches, "describe", return_value=device):
        fp8_products(INTERPRETED, how, FP8, torch.float16)
        fp8_products(INTERPRETED, how, FP8_EVERYTHING, torch.float32)


@check()
def fp8_of_wrong_sizes():
    with mock.patch.object(op, "check"):
        arguments, grad = problem(FP8)
        expected = kernels(arguments, grad, precision="fp8")
        arguments["group_sizes"][2] = 26
        made = kernels(arguments, grad, precision="fp8")
    for name, keeps in (("out", 130), ("grad_x", 130), ("grad_weight", 2)):
        assert torch.equal(made[name][:keeps], expected[name][:keeps])
        assert made[name][keeps:].isnan().all()


@check()
def fp8_registered_and_without_rows():
    arguments, grad = problem(FP8_EVERYTHING)
    expected = kernels(arguments, grad, precision="fp8")
    with Watched():
        assert_equal(kernels(arguments, grad, precision="fp8"), expected)
    for case in (GroupedCase("", (0, 0), 128, 128), GroupedCase("", (0, 0), 128, 128, tail=3)):
        arguments, grad = problem(case)
        assert not any(x.any() for x in kernels(arguments, grad, precision="fp8").values())


@check()
def no_rows_at_all():
    for case in (
        GroupedCase("", (0, 0), 8, 4),
        GroupedCase("", (0, 0), 8, 4, row_scale=True, source_rows=3, options={"num_rows": 2}),
    ):
        arguments, grad = problem(case)
        made = kernels(arguments, grad)
        assert not any(x.any() for x in made.values())
        assert made["grad_x"].shape == arguments["x"].shape
        total = torch.zeros_like(arguments["weight"])
        with mock.patch.object(op, "check"):
            arguments["group_sizes"][1] = 1
            made = kernels(arguments, grad)
            grouped_matmul(**arguments, backend="triton", weight_grad_out=total).backward(grad)
        weights = {"weight": made.pop("grad_weight"), "total": total}
        assert_nan(made | {name: x[1] for name, x in weights.items()})
        assert not any(x[0].any() for x in weights.values())


# Parts of "everything", and further wrong numbers.
SLOW = (
    *(f"case-{x}" for x in ("even", "odd sizes", "all in one group", "one number", "bias", "row scales", "rows")),
    "case-scatter",
    "wide-1", "wrong-rows above", "wrong-scatter_rows below",
    "fp8-gkn", "fp8-interleaved", "fp8-pointers",
    "fp8_registered_and_without_rows",
    "wrong_sizes-sizes whose sum overflows", "wrong_sizes-offsets past the end", "wrong_sizes-a negative offset",
)  # fmt: skip
assert CHECKS.keys() >= set(SLOW)

if __name__ == "__main__":
    from fp8_linear import fp8_interpreter

    fp8_interpreter.mend()
    main(CHECKS, sys.argv[1:])
