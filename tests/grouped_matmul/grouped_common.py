"""What the tests of grouped_matmul share."""

from itertools import pairwise

import numpy as np
import torch

from onchip.ops.fp8_linear import reference as fp8_reference
from onchip.ops.grouped_matmul import reference
from onchip.ops.grouped_matmul.cases import GroupedCase, make_inputs
from onchip.oracle.torch import as_array
from onchip.torch import grouped_matmul

SWIGLU = {"activation": "swiglu"}
EVERYTHING = GroupedCase("everything", (10, 0, 17, 3), 24, 16, tail=5, bias=True, row_scale=True, source_rows=12,
                  options={**SWIGLU, "num_rows": 14})  # fmt: skip
# Sizes that the kernels' FP8 takes, with groups of more and of less than a tile; and with all that surrounds a product.
FP8 = GroupedCase("fp8", (130, 0, 17, 3), 256, 128, tail=5)
FP8_EVERYTHING = GroupedCase("fp8, everything", (130, 0, 17, 3), 256, 128, tail=5, bias=True, row_scale=True,
                             source_rows=80, options={**SWIGLU, "num_rows": 90})  # fmt: skip
PLAIN = GroupedCase("plain", (20, 0, 44), 40, 24, tail=6)
NAMES = ("x", "weight", "bias", "row_scale")


def problem(case=EVERYTHING, dtype=torch.float32, device="cpu", seed=0):
    """The arguments of a case by name, those that can be differentiated as leaves, and the gradient of its result."""
    made = make_inputs(case, seed)._asdict()
    arguments = {}
    for name, x in made.items():
        if x is not None:
            x = torch.from_numpy(x).to(device)
            arguments[name] = x.to(dtype).requires_grad_(name in NAMES) if x.is_floating_point() else x
    grad = arguments.pop("grad_out").detach()
    return arguments | case.options, grad


def leaves(arguments):
    return {name: arguments[name] for name in NAMES if name in arguments and arguments[name].requires_grad}


def step(arguments, grad, **more):
    """Output and gradients by name."""
    out = grouped_matmul(**arguments, **more)
    given = leaves(arguments)
    return {"out": out.detach()} | dict(
        zip((f"grad_{name}" for name in given), torch.autograd.grad(out, list(given.values()), grad), strict=True)
    )


def oracle(arguments, grad):
    plain = {k: as_array(x) if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
    return reference.grouped_matmul(**plain, grad_out=as_array(grad))


def assert_same(made, expected, bound=1e-5):
    """By the relative norm of each; on a GPU that is taken there."""
    for name, x in made.items():
        right = torch.as_tensor(expected[name] if isinstance(expected, dict) else getattr(expected, name)).detach()
        error = (x.detach().to(right.dtype) - right.to(x.device)).norm() / right.norm().clamp(min=1e-30)
        assert error <= bound, (name, error)


def assert_equal(made, expected):
    """Bit for bit."""
    for name, x in made.items():
        assert torch.equal(x, expected[name]), name


def assert_nan(made):
    """All of each."""
    for name, x in made.items():
        assert x.isnan().all(), name


def strided(x):
    """With every other number of memory."""
    return torch.stack([x.detach(), x.detach()], -1)[..., 0].requires_grad_(x.requires_grad)


def turned(arguments):
    """The same with each weight as [K, N]."""
    weight = arguments["weight"].detach().mT.contiguous().requires_grad_()
    return arguments | {"weight": weight, "weight_layout": "gkn"}


def assert_rows_past_the_last_group_are_not_read(device="cpu", **more):
    """Nor their scales, indices and gradients; what they would write is 0."""
    for case in (PLAIN, EVERYTHING):
        arguments, grad = problem(case, device=device)
        expected, last = step(arguments, grad, **more), sum(case.sizes)
        with torch.no_grad():
            if "rows" in arguments:
                arguments["row_scale"][last:] = torch.nan
                arguments["rows"][last:] = -7
                arguments["scatter_rows"][last:] = 1 << 20
            else:
                arguments["x"][last:] = torch.nan
                grad[last:] = torch.nan
        made = step(arguments, grad, **more)
        assert_equal(made, expected)
        tails = ("grad_row_scale",) if "rows" in arguments else ("out", "grad_x")
        assert not any(made[name][last:].any() for name in tails)


# Of four groups and 35 rows: the argument, its values, and the first group that is wrong.
WRONG_SIZES = {
    "a negative size": ("group_sizes", [10, 7, -1, 3], 2),
    "more rows than there are": ("group_sizes", [10, 25, 0, 1], 3),
    "sizes whose sum overflows": ("group_sizes", [2**62, 2**62, 2**62, 2**62], 0),
    "offsets that fall": ("group_offsets", [10, 12, 11, 30], 2),
    "offsets past the end": ("group_offsets", [10, 36, 36, 36], 1),
    "a negative offset": ("group_offsets", [-1, 2, 3, 30], 0),
}


def assert_nan_from_the_first_wrong_group_on(which, values, first, device="cpu", **more):
    """Of rows and groups; those before are as they are without the others.  What is added up from rows is NaN."""
    ends = values if which == "group_offsets" else torch.tensor(values).cumsum(0).tolist()
    right = [*ends[:first], *[ends[first - 1] if first else 0] * (4 - first)]
    for case in (
        GroupedCase("", (10, 0, 17, 3), 40, 24, tail=5, bias=True, row_scale=True, options=SWIGLU),
        EVERYTHING,
    ):
        arguments, grad = problem(case, device=device)
        del arguments["group_sizes"]
        expected = step(arguments | {"group_offsets": torch.tensor(right, device=device)}, grad, **more)
        made = step(arguments | {which: torch.tensor(values, device=device)}, grad, **more)
        for name, x in made.items():
            keeps = first if name in ("grad_weight", "grad_bias") else right[-1]
            if case is EVERYTHING and name in ("out", "grad_x"):
                keeps = 0
            assert torch.equal(x[:keeps], expected[name][:keeps]), name
            assert x[keeps:].isnan().all(), name


def fp8_oracle(arguments, grad):
    """Of precision='fp8': each group as fp8_linear's oracle has it, between what surrounds the products."""
    plain = {k: as_array(x) if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
    w, x, sizes = plain["weight"], plain["x"], plain["group_sizes"]
    w = w.swapaxes(1, 2) if plain.get("weight_layout") == "gkn" else w
    read = plain.get("rows", np.arange(len(x)))
    products, dtype = np.zeros((len(read), w.shape[1])), arguments["x"].dtype

    def rounded(a):
        return as_array(torch.from_numpy(a).to(dtype))

    bounds = np.cumsum([0, *sizes])
    groups = [slice(a, b) for a, b in pairwise(bounds) if b > a]
    numbers = [g for g, size in enumerate(sizes) if size > 0]
    for g, mine in zip(numbers, groups, strict=True):
        products[mine] = fp8_reference.fp8_linear(x[read[mine]], w[g]).out
    # What surrounds the products, by the oracle with a weight of ones and zeros.
    around = {name: plain[name] for name in ("row_scale", "activation", "gate_up", "scatter_rows", "num_rows")
              if name in plain}  # fmt: skip
    ones = np.broadcast_to(np.eye(w.shape[1]), (len(w), w.shape[1], w.shape[1]))
    made = reference.grouped_matmul(products, ones, sizes, bias=plain.get("bias"), grad_out=as_array(grad), **around)
    d = rounded(made.grad_x)
    grad_x, grad_weight = np.zeros(x.shape), np.zeros(w.shape)
    for g, mine in zip(numbers, groups, strict=True):
        result = fp8_reference.fp8_linear(x[read[mine]], w[g], grad_out=d[mine])
        np.add.at(grad_x, read[mine], result.grad_x)
        grad_weight[g] = result.grad_weight
    grad_weight = grad_weight.swapaxes(1, 2) if plain.get("weight_layout") == "gkn" else grad_weight
    return made._replace(grad_x=grad_x, grad_weight=grad_weight)
