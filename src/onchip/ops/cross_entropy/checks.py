"""The contract: the oracle in NumPy float64 with gradients, and named problems, with real models' sizes or awkward
numbers, on which tests, `onchip check` and `onchip bench` compare every backend with it.  No framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.cases import (
    MODELS,
    Numbers,
    class_cases,
    draw_class_weight,
    draw_factors,
    draw_target,
    ignore_some,
    loss_cases,
    named_case,
    softmax_cases,
    target_logit,
)
from onchip.oracle.checks import Checker, kernel_refusals, op_in, plain_cross_entropy
from onchip.oracle.reference import Logits, with_gradients


def cross_entropy(
    logits: npt.ArrayLike,  # [..., V]
    target: npt.ArrayLike,  # [...]
    **options: Any,
) -> Any:
    """The fields of `onchip.oracle.reference.Loss`, and grad_logits, the gradient of sum(grad_loss * loss).

    The options are those of `onchip.oracle.reference.cross_entropy`, which also says how ignored tokens and targets
    out of range are treated.
    """
    given = Logits(logits)
    made = reference.cross_entropy(given.products, given.backward, given.vocab, target, **options)
    return with_gradients(made._asdict(), given)


@dataclass(frozen=True)
class CrossEntropyCase(Numbers):
    """One problem: its shape, what its numbers look like, and the options that it passes to the op."""

    name: str
    tokens: int
    vocab: int
    sliced: int = 0
    """How many more columns each row has in memory, as when a padded vocabulary is cut off."""

    def __str__(self) -> str:
        return self.name


class CrossEntropyInputs(NamedTuple):
    """The arrays of one case, floats in float32; None where the case has no such array."""

    logits: npt.NDArray[np.float32]  # [T, V], or [T, V + sliced], whose last columns are NaN
    target: npt.NDArray[np.int64]  # [T]
    token_weight: npt.NDArray[np.float32] | None  # [T]
    temperature: npt.NDArray[np.float32] | None  # [T]
    grad_loss: npt.NDArray[np.float32]  # [T] for reduction="none", else []
    class_weight: npt.NDArray[np.float32] | None  # [V]


def make_inputs(case: CrossEntropyCase, seed: int = 0) -> CrossEntropyInputs:
    """Random inputs of `case`: logits ~ N(logit_offset, logit_std), the rest as the case says."""
    rng = np.random.default_rng(seed)
    tokens, vocab = case.tokens, case.vocab
    logits = rng.standard_normal((tokens, vocab), dtype=np.float32) * np.float32(case.logit_std)
    first = min(case.masked, vocab - 1)
    target = draw_target(case, rng)
    if case.target_prob is not None:
        logits[np.arange(tokens), target] = target_logit(case)
    logits += np.float32(case.logit_offset)
    logits[:, :first] = -np.inf
    padding = np.full((tokens, case.sliced), np.nan, np.float32)
    ignore_some(case, target, rng)
    logits = np.concatenate([logits, padding], 1) if case.sliced else logits
    return CrossEntropyInputs(logits, target, *draw_factors(case, rng), draw_class_weight(case, rng))


_case = partial(named_case, CrossEntropyCase)


def _of_logits(name: str, tokens: int, hidden: int, vocab: int, **more: Any) -> CrossEntropyCase:
    return _case(name, tokens, vocab, **more)


CHECK_CASES = (
    *softmax_cases(_of_logits),
    *loss_cases(_of_logits, sliced=24),
    _case("sliced", 127, 1000, sliced=24),
)
CLASS_CASES = class_cases(_of_logits, sliced=24)
LLAMA = "llama3.1-8b"
# What `onchip bench` runs: by default a model's head and variants of it, a short vocabulary, and those of images,
# characters or small tokenizers.
SUITES = {
    "cpu": (_case("cpu", 2048, 16384),),
    "cuda": (
        _case(LLAMA, 8192, MODELS[LLAMA][1]),
        _case(f"{LLAMA}-half-ignored", 8192, MODELS[LLAMA][1], ignored=0.5),
        _case(f"{LLAMA}-offset", 8192, MODELS[LLAMA][1], logit_offset=100.0),
        _case(f"{LLAMA}-sliced", 8192, MODELS[LLAMA][1], sliced=128),
        _case("vocab-32000", 8192, 32000),
        _case("vocab-8192", 16384, 8192),
        _case("vocab-1000", 32768, 1000),
    ),
    "lengths": (_case(f"{LLAMA}-lengths", 8192, MODELS[LLAMA][1]),),
    "others": (
        *(_case(name, 8192, vocab) for name, (_, vocab) in MODELS.items() if name != LLAMA),
        _case(f"{LLAMA}-zipf", 8192, MODELS[LLAMA][1], zipf=True),
        # More than 2**31 logits.
        _case(f"{LLAMA}-t16896", 16896, MODELS[LLAMA][1]),
    ),
}


def plain_refusals(device: str, dtype: str, framework: str, given: Mapping[str, Any] = {}) -> dict[str, str | None]:
    """As `kernel_refusals`, of the op's own backends."""
    if framework == "jax":
        from onchip.vocab.jax_ways import row_refusals_of

        return row_refusals_of(device, dtype, given)
    return kernel_refusals("onchip.kernels.triton.launch:device_refusal", device, dtype, framework, given)


def _call(fw: Any, how: Mapping[str, Any], logits: Any, target: Any, **keywords: Any) -> dict[str, Any]:
    more = dict(how)
    if more.pop("inplace", False):
        logits, more["inplace_backward"] = fw.computed(logits), True
    loss, stats = op_in(fw, "cross_entropy")(logits, target, **keywords, **more, return_stats=True)
    return {"loss": loss, **stats._asdict()}


CHECKER = Checker(
    names=("logits", "target"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=cross_entropy,
    call=_call,
    cases=(*CHECK_CASES, *CLASS_CASES),
    # With a new gradient and, in PyTorch, one over the logits.
    hows=lambda fw: [{"inplace": x} for x in (False, True)] if fw.NAME == "torch" else [{}],
    refusals=plain_refusals,
    plain=lambda fw, how, logits, target, **keywords: {"loss": plain_cross_entropy(logits, target, **keywords)},
)
