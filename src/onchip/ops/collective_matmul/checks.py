"""How both functions are compared with the oracle: what `onchip check` and the tests run.  No framework.

A check has a whole problem, of which each rank takes its part: the whole results are those of one linear layer.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.collectives.problem import GATHER, SCATTER
from onchip.ops.collective_matmul.cases import CHECK_CASES, CollectiveCase, make_inputs
from onchip.oracle.checks import Checker, product_bound, rounding_error

Array = npt.NDArray[np.float64]


class CollectiveResult(NamedTuple):
    """Output and gradients of sum(grad_out * out)."""

    out: Array
    grad_x: Array
    grad_weight: Array
    grad_bias: Array


def oracle(
    x: npt.ArrayLike, weight: npt.ArrayLike, bias: npt.ArrayLike | None = None, *, grad_out: npt.ArrayLike
) -> CollectiveResult:
    """What all ranks make together, in float64: of x [T, ..., K], weight [N, K], bias [N] and grad_out [T, ..., N]."""
    x, weight, g = (np.asarray(a, np.float64) for a in (x, weight, grad_out))
    rows, of_rows = (a.reshape(-1, a.shape[-1]) for a in (x, g))
    out = x @ weight.T + (0.0 if bias is None else np.asarray(bias, np.float64))
    return CollectiveResult(out, g @ weight, of_rows.T @ rows, of_rows.sum(0))


def limits(
    case: CollectiveCase, dtype: str, how: Mapping[str, Any], oracle: CollectiveResult, given: Mapping[str, Array]
) -> dict[str, tuple[Array, float]]:
    """Each result is a sum of products that is rounded once."""
    rows = case.tokens * (case.middle or 1)
    lengths = {"out": case.k, "grad_x": case.n, "grad_weight": rows, "grad_bias": rows}
    right = oracle._asdict()
    return {name: (right[name], rounded_bound(dtype, length, right[name])) for name, length in lengths.items()}


def rounded_bound(dtype: str, length: int, right: Array) -> float:
    """As `product_bound` for one rounding, or these numbers' actual rounding, which can be more for few of them."""
    return max(product_bound(dtype, length, 1), product_bound(dtype, length, 0) + 1.01 * rounding_error(right, dtype))


def plain_refusals(
    device: str, dtype: str = "bfloat16", framework: str = "torch", given: Mapping[str, Any] = {}
) -> dict[str, str | None]:
    """Why each backend can't serve a call in a group that has what it needs for the device, or None."""
    if framework == "jax":
        return {"xla": None}
    import torch

    from onchip.collectives.torch_buffers import refusal
    from onchip.collectives.torch_ring import ProcessRing

    alone = ProcessRing("", 0, 1)
    of_symmetric = refusal(alone, torch.device(device), getattr(torch, dtype))
    return {"symmetric": of_symmetric, "collective": None, "ring": None}


def _refusals(device: str, dtype: str, framework: str, given: Mapping[str, Any]) -> dict[str, str | None]:
    """Why each backend can't serve a call in the existing process group."""
    refusals = plain_refusals(device, dtype, framework, given)
    if framework == "torch" and refusals["symmetric"] is None:
        import torch

        from onchip.collectives.torch_buffers import mapping_refusal
        from onchip.collectives.torch_ring import ring_of

        ring = ring_of(GATHER, None)
        alone = "nothing travels" if ring.ranks == 1 else None
        refusals["symmetric"] = alone or mapping_refusal(ring, torch.cuda.current_device())
    return refusals


def _call(fw: Any, how: Mapping[str, Any], x: Any, weight: Any, bias: Any, grad_out: Any) -> dict[str, Any]:
    whole: Any = import_module(f"onchip.ops.collective_matmul.{fw.NAME}_checks").whole
    return {"out": whole(x, weight, bias, **how)}


def _hows(fw: Any) -> list[dict[str, Any]]:
    hows: list[dict[str, Any]] = [{"op": GATHER}, {"op": GATHER, "keep_gathered": True}, {"op": SCATTER}]
    return hows if fw.NAME == "torch" else [{**how, "weight_layout": layout} for how in hows for layout in ("nk", "kn")]


def _session(device: str, framework: str) -> AbstractContextManager[None]:
    made: Any = import_module(f"onchip.ops.collective_matmul.{framework}_checks")
    session: AbstractContextManager[None] = made.session(device)
    return session


CHECKER = Checker(
    names=("x", "weight", "bias", "grad_out"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=oracle,
    call=_call,
    cases=CHECK_CASES,
    hows=_hows,
    refusals=_refusals,
    values=("out",),
    keywords=lambda inputs: {},
    defaults={"torch": {"backend": "ring"}, "jax": {"backend": "xla"}},
    constant=lambda name, inputs, how: name == "grad_out",  # among the arguments to be rounded as they are
    limits=limits,
    session=_session,
)
