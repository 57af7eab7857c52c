"""The contract: the oracle in NumPy float64 with gradients, and named problems, with real models' sizes or awkward
numbers, on which tests, `onchip check` and `onchip bench` compare every backend with it.  No framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.cases import (
    MODELS,
    TERMS,
    Case,
    class_cases,
    loss_cases,
    make_inputs,
    named_case,
    softmax_cases,
)
from onchip.oracle.checks import Checker, adapter_of, kernel_refusals, op_in, plain_cross_entropy
from onchip.oracle.reference import Linear, with_gradients


def linear_cross_entropy(
    hidden: npt.ArrayLike,  # [..., H]
    weight: npt.ArrayLike,  # [V, H]
    target: npt.ArrayLike,  # [...]
    bias: npt.ArrayLike | None = None,  # [V]
    *,
    shift: bool = False,
    ignore_index: int = -100,
    token_weight: npt.ArrayLike | None = None,  # [...]
    **options: Any,
) -> Any:
    """The fields of `onchip.oracle.reference.Loss`, and the gradients of sum(grad_loss * loss), grad_hidden and so on.

    The options are those of `onchip.oracle.reference.cross_entropy`, which also says how ignored tokens and targets out
    of range are treated.  With `shift` each position has the next one's target and weight, and the last one none.
    """
    if shift:
        target = _next(np.asarray(target).astype(np.int64), ignore_index)
        token_weight = None if token_weight is None else _next(np.asarray(token_weight), 0)
    layer = Linear(hidden, weight, bias)
    result = reference.cross_entropy(
        layer.products,
        layer.backward,
        layer.vocab,
        target,
        ignore_index=ignore_index,
        token_weight=token_weight,
        **options,
    )
    return with_gradients(result._asdict(), layer)


def _next(x: npt.NDArray[Any], last: int) -> npt.NDArray[Any]:
    """`x` at the next position, and `last` at the end of each sequence."""
    return np.concatenate([x[..., 1:], np.full_like(x[..., :1], last)], -1)


_case = partial(named_case, Case)
CHECK_CASES = (
    *softmax_cases(_case),
    *loss_cases(_case, bias=True),
    _case("bias", 127, 64, 1000, bias=True),
)


CLASS_CASES = class_cases(_case, bias=True, softcap=15.0)


@dataclass(frozen=True)
class BenchCase(Case):
    """A problem of `onchip bench`."""

    frozen: bool = False
    """The weight gets no gradient."""
    autocast: bool = False
    """The weight is float32, and autocast casts it for the products."""


_timed = partial(named_case, BenchCase)
# deepseek-v3 has the widest rows; with twice the tokens it is also the largest of the products.
MODEL_CASES = tuple(_timed(name, 8192 if name == "deepseek-v3" else 4096, h, v) for name, (h, v) in MODELS.items())
LLAMA = "llama3.1-8b"
LLAMA_TOKEN_SWEEP = tuple(_timed(f"{LLAMA}-t{t}", t, *MODELS[LLAMA]) for t in (1024, 4096, 8192, 16384, 32768))
# Heads that many people train, (H, V).
SMOLLM, QWEN, LLAMA_1B = (576, 49152), (1024, 151936), (2048, 128256)
# What they do with these and with LLAMA's, the most frequent first.
USERS = (
    _timed("qwen3-0.6b-t8192", 8192, *QWEN),
    _timed("llama3.2-1b-t8192", 8192, *LLAMA_1B),
    _timed(f"{LLAMA}-t8192", 8192, *MODELS[LLAMA]),
    _timed(f"{LLAMA}-t8192-frozen", 8192, *MODELS[LLAMA], frozen=True),
    _timed(f"{LLAMA}-t512", 512, *MODELS[LLAMA]),
    _timed(f"{LLAMA}-t32768", 32768, *MODELS[LLAMA]),
    _timed("qwen3-0.6b-t32768", 32768, *QWEN),
    _timed("gemma2-9b-t4096-softcap", 4096, 3584, 256000, softcap=30.0),
    _timed(f"{LLAMA}-t8192-ignored", 8192, *MODELS[LLAMA], ignored=0.9),
    _timed("llama3.2-1b-t8192-smoothing-z-loss", 8192, *LLAMA_1B, **TERMS),
    _timed("qwen3-0.6b-t8192-autocast", 8192, *QWEN, autocast=True),
    _timed("llama3.2-1b-t8192-autocast", 8192, *LLAMA_1B, autocast=True),
    _timed("qwen2.5-0.5b-t16384", 16384, 896, 151936),
    _timed("gemma3-270m-t8192", 8192, 640, 262144),
    _timed("smollm-t16384", 16384, *SMOLLM),
    _timed(f"{LLAMA}-t2048", 2048, *MODELS[LLAMA]),
    _timed(f"{LLAMA}-t4096-per-token", 4096, *MODELS[LLAMA], reduction="none"),
    _timed("llama3.2-1b-t32768", 32768, *LLAMA_1B),
    _timed("qwen3-4b-t16384", 16384, 2560, 151936),
    _timed("gemma3-1b-t8192", 8192, 1152, 262144),
)
# Of vocabularies that ranks share.
WORLD = (_timed(f"{LLAMA}-t8192", 8192, *MODELS[LLAMA]), _timed("gemma3-4b-t8192", 8192, *MODELS["gemma3-4b"]))
WORLD_SUITES = {"cpu": (_timed("cpu-world", 512, 256, 8192),), "world": WORLD}
# What `onchip bench` runs.
SUITES = {
    "cpu": (_timed("cpu", 4096, 1024, 32768),),
    "sweeps": (
        *(_timed(f"vocab-{v}", 2048, 512, v) for v in (2048, 4096, 8192, 16384, 32768)),
        *(_timed(f"tokens-{t}", t, 512, 16384) for t in (256, 512, 1024, 2048, 4096)),
    ),
    "lengths": (_timed(f"{LLAMA}-lengths", 8192, *MODELS[LLAMA]),),
    "users": USERS,
    "world": WORLD,
    "cuda": (
        *MODEL_CASES,
        _timed(f"{LLAMA}-half-ignored", 4096, *MODELS[LLAMA], ignored=0.5),
        _timed(f"{LLAMA}-zipf", 4096, *MODELS[LLAMA], zipf=True),
        _timed(f"{LLAMA}-peaked", 4096, *MODELS[LLAMA], target_prob=0.999),
        _timed(f"{LLAMA}-std30", 4096, *MODELS[LLAMA], logit_std=30.0),
        *LLAMA_TOKEN_SWEEP,
    ),
}


def plain_refusals(device: str, dtype: str, framework: str, given: Mapping[str, Any] = {}) -> dict[str, str | None]:
    """As `kernel_refusals`; in JAX refusals depend on the sizes, the layout and the strategy."""
    if framework == "torch":
        return kernel_refusals("onchip.vocab.triton.setup:refusal", device, dtype, framework)
    from onchip.vocab.jax_ways import refusals_of

    return refusals_of(device, dtype, given)


def _call(
    fw: Any, how: Mapping[str, Any], hidden: Any, weight: Any, target: Any, bias: Any, **keywords: Any
) -> dict[str, Any]:
    weight = weight.T if how.get("weight_layout") == "hv" else weight
    op, how = op_in(fw, "linear_cross_entropy"), dict(how)
    if how.pop("loss_alone", False):
        return {"loss": op(hidden, weight, target, bias, **keywords, **how)}
    loss, stats = op(hidden, weight, target, bias, **keywords, **how, return_stats=True)
    return {"loss": loss, **stats._asdict()}


def plain_linear_cross_entropy(hidden: Any, weight: Any, target: Any, bias: Any = None, **options: Any) -> Any:
    """The same loss written with the framework's own functions in hidden's dtype, logits and all."""
    return plain_cross_entropy(adapter_of(hidden).linear(hidden, weight, bias), target, **options)


CHECKER = Checker(
    names=("hidden", "weight", "target", "bias"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=linear_cross_entropy,
    call=_call,
    cases=(*CHECK_CASES, *CLASS_CASES),
    # Statistics take other kernels than the loss alone.
    hows=lambda fw: [{"strategy": "stash"}, {"strategy": "recompute"}, {"strategy": "stash", "loss_alone": True}],
    refusals=plain_refusals,
    plain=lambda fw, how, **given: {"loss": plain_linear_cross_entropy(**given)},
)
