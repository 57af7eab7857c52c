"""How the op is compared with its oracle: what `onchip check` and the tests run.  No framework."""

from collections.abc import Mapping
from typing import Any

from onchip.ops.grouped_matmul import reference
from onchip.ops.grouped_matmul.cases import CHECK_CASES, GroupedCase, make_inputs
from onchip.ops.grouped_matmul.reference import Array
from onchip.oracle.checks import Checker, op_in, product_bound


def limits(
    case: GroupedCase, dtype: str, how: Mapping[str, Any], oracle: reference.GroupedResult, given: Mapping[str, Array]
) -> dict[str, tuple[Array, float]]:
    return {name: (getattr(oracle, name), limit) for name, limit in bounds(case, dtype).items()}


def bounds(case: GroupedCase, dtype: str) -> dict[str, float]:
    """Limits of the relative errors: of sums of products in float32, and of each rounding to `dtype`.

    The output is rounded once, with `scatter_rows` each addend too.  The gradients are products of what was rounded: of
    the gradient of the products, made of a rounded pre-activation where there is an activation.
    """
    scattered, activated = "num_rows" in case.options, "activation" in case.options
    roundings = {"out": 1 + scattered, "grad_x": 2 + activated, "grad_weight": 2 + activated}
    roundings |= {"grad_bias": 2 + activated, "grad_row_scale": 2}
    return {name: product_bound(dtype, length, roundings[name]) for name, length in lengths(case).items()}


def lengths(case: GroupedCase) -> dict[str, int]:
    """How many numbers each result sums up."""
    forward, rows = case.k, max(case.sizes)
    return {
        "out": forward,
        "grad_x": forward + case.n,
        "grad_weight": forward + rows,
        "grad_bias": forward + rows,
        "grad_row_scale": forward + case.n,
    }


def plain_refusals(
    device: str, dtype: str = "bfloat16", framework: str = "torch", given: Mapping[str, Any] = {}
) -> dict[str, str | None]:
    """As `kernel_refusals`, of the op's own backends."""
    if framework == "jax":
        from onchip.ops.grouped_matmul import jax_op
        from onchip.oracle.jax import platform_of

        return jax_op.refusals(platform_of(device), dtype, given.get("n", 128), given.get("k", 128))
    import torch

    from onchip.ops.grouped_matmul import torch_op

    groups = len(given.get("sizes", ()))
    return torch_op.refusals(torch.device(device), getattr(torch, dtype), groups, named=True)


def _call(fw: Any, how: Mapping[str, Any], x: Any, weight: Any, group_sizes: Any, **more: Any) -> dict[str, Any]:
    del more["grad_out"]
    weight = fw.xp.swapaxes(weight, 1, 2) if how.get("weight_layout") == "gkn" else weight
    return {"out": op_in(fw, "grouped_matmul")(x, weight, group_sizes, **how, **more)}


CHECKER = Checker(
    names=("x", "weight", "group_sizes", "bias", "row_scale", "rows", "scatter_rows", "grad_out"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=reference.grouped_matmul,
    call=_call,
    cases=CHECK_CASES,
    hows=lambda fw: [{"weight_layout": x} for x in ("gnk", "gkn")],
    refusals=plain_refusals,
    values=("out",),
    keywords=lambda inputs: {},
    defaults={"torch": {"backend": "plain"}, "jax": {"backend": "xla"}},
    constant=lambda name, inputs, how: name == "grad_out",  # among the arguments to be rounded as they are
    limits=limits,
)
