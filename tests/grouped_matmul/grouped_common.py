"""What the tests of grouped_matmul share."""

import torch

from onchip.ops.grouped_matmul import reference
from onchip.ops.grouped_matmul.cases import Case, make_inputs
from onchip.oracle.torch import as_array
from onchip.torch import grouped_matmul

SWIGLU = {"activation": "swiglu"}
EVERYTHING = Case("everything", (10, 0, 17, 3), 24, 16, tail=5, bias=True, row_scale=True, source_rows=12,
                  options={**SWIGLU, "num_rows": 14})  # fmt: skip
PLAIN = Case("plain", (20, 0, 44), 40, 24, tail=6)
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


def assert_rows_past_the_last_group_are_not_read(**more):
    """Nor their scales, indices and gradients; what they would write is 0."""
    for case in (PLAIN, EVERYTHING):
        arguments, grad = problem(case)
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
    for case in (Case("", (10, 0, 17, 3), 40, 24, tail=5, bias=True, row_scale=True, options=SWIGLU), EVERYTHING):
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
