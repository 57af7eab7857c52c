"""How the op is compared with its oracle: what `onchip check` and the tests run.  No framework."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from onchip.ops.attention import reference
from onchip.ops.attention.cases import CHECK_CASES, AttentionCase, make_inputs
from onchip.ops.attention.reference import Array
from onchip.oracle.checks import DEVIATIONS, UNIT_ROUNDOFF, Checker, op_in


def limits(
    case: AttentionCase,
    dtype: str,
    how: Mapping[str, Any],
    oracle: reference.AttentionResult,
    given: Mapping[str, Array],
) -> dict[str, tuple[Array, float]]:
    """Each result, and the limit of its relative error.

    A score has an error of its own size and of its sum of D products; exponentials turn it into a relative one of
    probabilities.  Sums of these over keys, or queries, walk at random.  To `dtype` out is rounded once; gradients are
    made of it, of a difference of two numbers of about their size, and rounded once more.  Kernels round probabilities
    before these are multiplied with values.
    """
    wide = UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    scale = float(case.options.get("scale", case.size**-0.5))
    spread = scale * case.std**2 * case.size**0.5
    largest = min(spread * 4, float(case.options.get("softcap", np.inf)))
    score = 2 * wide * (1 + largest + spread * float(np.sqrt(case.size / 24)))
    sums = 2 * wide * (1 + float(np.sqrt((case.queries + case.keys + case.value_size) / 24)))
    of_product = DEVIATIONS * (score + sums)
    narrow = 0.0 if dtype in ("float32", "float64") else UNIT_ROUNDOFF[dtype]
    roundings = {"out": 2 if how.get("backend") in ("triton", "mosaic_gpu") else 1, "lse": 0}
    made = {}
    for name in oracle._fields:
        right = getattr(oracle, name)
        limit = of_product
        if name == "lse":
            there = right[np.isfinite(right)]
            rms = float(np.sqrt(np.mean(there**2))) if there.size else 0.0
            limit = DEVIATIONS * (score + 2 * wide) / rms if rms else DEVIATIONS * score
        made[name] = right, limit + narrow * roundings.get(name, 4)
    if not case.sinks:
        del made["grad_sinks"]
    return made


def plain_refusals(
    device: str, dtype: str = "bfloat16", framework: str = "torch", given: Mapping[str, Any] = {}
) -> dict[str, str | None]:
    """As `kernel_refusals`, of the op's own backends."""
    if framework == "jax":
        return {"xla": None}
    import torch

    from onchip.attention.problem import AttentionOptions, AttentionProblem
    from onchip.ops.attention import torch_op

    names = "batch", "queries", "keys", "heads", "key_heads", "size", "value_size"
    p = AttentionProblem(**{name: given.get(name, 64) for name in names})
    blocked, sinks = given.get("mask") == "blocked", bool(given.get("sinks"))
    return torch_op.refusals(
        torch.device(device), getattr(torch, dtype), p, AttentionOptions(), 1.0, blocked=blocked, backward=True,
        sinks=sinks,
    )  # fmt: skip


def _turned(fw: Any, x: Any) -> Any:
    return fw.xp.swapaxes(x, 1, 2)


def _call(
    fw: Any, how: Mapping[str, Any], q: Any, k: Any, v: Any, sinks: Any, *, case: AttentionCase, **more: Any
) -> dict[str, Any]:
    device = str(q.device) if fw.NAME == "torch" else "cpu"
    mask = case.make_mask(lambda x: fw.constant(x, device))
    turns = how.get("layout") == "bhtd"
    if turns:
        q, k, v = (_turned(fw, x) for x in (q, k, v))
    out, lse = op_in(fw, "attention")(q, k, v, mask, sinks=sinks, return_lse=True, **how, **more)
    return {"out": _turned(fw, out), "lse": _turned(fw, lse)} if turns else {"out": out, "lse": lse}


def _plain(
    fw: Any,
    how: Mapping[str, Any],
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    *,
    case: AttentionCase,
    scale: float | None = None,
    softcap: float | None = None,
) -> dict[str, Any]:
    """Written with the framework's own functions, in the dtype of q: as a model's eager attention."""
    device = str(q.device) if fw.NAME == "torch" else "cpu"
    seen = fw.constant(np.array(case.seen()), device)
    group = case.heads // case.key_heads
    q, k, v = (_turned(fw, x) for x in (q, k, v))
    k, v = (fw.xp.stack([x] * group, 2).reshape(case.batch, case.heads, case.keys, x.shape[-1]) for x in (k, v))
    z = q @ fw.xp.swapaxes(k, 2, 3) * (case.size**-0.5 if scale is None else scale)
    if softcap is not None:
        z = softcap * fw.xp.tanh(z / softcap)
    lowest = -1e4 if "float16" in str(q.dtype) else -1e30
    z = fw.xp.where(seen[:, None], z, lowest)
    if sinks is not None:
        sink = fw.like(sinks, z).reshape(1, -1, 1, 1) + 0 * q[..., :1]
        z = fw.xp.concatenate([z, sink], -1)
    lse = fw.logsumexp(z, -1)
    p = fw.xp.exp(fw.log_softmax(z, -1))[..., : case.keys]
    p = fw.xp.where(seen[:, None], p, 0)
    return {"out": _turned(fw, p @ v), "lse": _turned(fw, lse)}


def _oracle(case: AttentionCase, **given: Any) -> reference.AttentionResult:
    return reference.attention(seen=case.seen(), **given)


class _OfCase(Checker):
    """With the case among the keyword arguments: its mask isn't one that is an array."""

    def as_arguments(self, case: Any, inputs: Any, dtype: Any, device: str = "cpu") -> tuple[list[Any], dict[str, Any]]:
        arguments, more = super().as_arguments(case, inputs, dtype, device)
        return arguments, {**more, "case": case}


CHECKER = _OfCase(
    names=("q", "k", "v", "sinks"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=_oracle,
    call=_call,
    plain=_plain,
    cases=CHECK_CASES,
    hows=lambda fw: [{"layout": x} for x in ("bthd", "bhtd")],
    refusals=plain_refusals,
    values=("out", "lse"),
    keywords=lambda inputs: {},
    limits=limits,
    defaults={"torch": {"backend": "plain"}, "jax": {}},
)
