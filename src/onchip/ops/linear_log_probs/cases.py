"""Named problems, with real models' sizes or awkward numbers, for the tests, `onchip check` and `onchip bench`."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import cases
from onchip.oracle.cases import MODELS, named_case, softmax_cases


@dataclass(frozen=True)
class LogProbsCase(cases.Case):
    """One problem: its shape, what its numbers look like, and the options that it passes to the op.

    With hidden=0 it is a problem for log_probs: the logits are given.
    """

    ids: int = 0
    """K, ids per token; 0 for one, without a dimension of its own."""
    ignored_ids: float = 0.0
    """Fraction of the single ids that are ignore_index, besides those of ignored tokens."""


class LogProbsInputs(NamedTuple):
    """The arrays of one case, floats in float32; None where the case has no such array."""

    hidden: npt.NDArray[np.float32] | None  # [T, H]
    weight: npt.NDArray[np.float32] | None  # [V, H]
    ids: npt.NDArray[np.int64]  # [T] or [T, K]
    bias: npt.NDArray[np.float32] | None  # [V]
    temperature: npt.NDArray[np.float32] | None  # [T]
    grad_log_prob: npt.NDArray[np.float32]  # as ids
    grad_entropy: npt.NDArray[np.float32]  # [T]
    grad_lse: npt.NDArray[np.float32]  # [T]
    logits: npt.NDArray[np.float32] | None = None  # [T, V]


def make_inputs(case: LogProbsCase, seed: int = 0) -> LogProbsInputs:
    """Random inputs: those of linear_cross_entropy, whose target is the first id, and upstream gradients ~ N(0, 1).

    If tokens have several ids, every fourth one has its first id twice.
    """
    made = cases.make_inputs(case if case.hidden else replace(case, hidden=1), seed)
    rng = np.random.default_rng(seed + 1)
    ignore_index = case.options.get("ignore_index", -100)
    ids = made.target
    if case.ids:
        first = min(case.masked, case.vocab - 1)
        ids = rng.integers(first, case.vocab, size=(case.tokens, case.ids))
        ids[:, 0] = made.target
        ids[::4, case.ids - 1] = made.target[::4]
        ids[made.target == ignore_index] = ignore_index
        ids[rng.random(ids.shape) < case.ignored_ids] = ignore_index
    logits = None if case.hidden else _draw_logits(case, made.target, made.bias, rng)
    return LogProbsInputs(
        made.hidden if case.hidden else None,
        made.weight if case.hidden else None,
        ids.astype(np.int64),
        made.bias if case.hidden else None,
        made.temperature,
        rng.standard_normal(ids.shape, dtype=np.float32),
        rng.standard_normal(case.tokens, dtype=np.float32),
        rng.standard_normal(case.tokens, dtype=np.float32),
        logits,
    )


def _draw_logits(
    case: LogProbsCase, target: npt.NDArray[np.int64], bias: npt.NDArray[np.float32] | None, rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """[T, V] logits ~ N(0, logit_std), with the targets' raised as the case says, plus the bias, which may mask."""
    logits = rng.standard_normal((case.tokens, case.vocab), dtype=np.float32) * np.float32(case.logit_std)
    if case.target_prob is not None:
        logits[np.arange(case.tokens), target] = cases.target_logit(case)
    return logits if bias is None else logits + bias


_case = partial(named_case, LogProbsCase)


def _of_logits(name: str, tokens: int, hidden: int, vocab: int, **more: Any) -> LogProbsCase:
    return _case(f"{name}, logits", tokens, 0, vocab, **more)


_EVERYTHING: dict[str, Any] = {
    "ids": 3,
    "ignored": 0.3,
    "ignored_ids": 0.2,
    "token_temperature": True,
    "softcap": 15.0,
    "logit_scale": 0.5,
}
CHECK_CASES = (
    *softmax_cases(_case),
    _case("peaked among several", 127, 520, 2049, target_prob=0.999, ids=4),
    _case("two ids", 127, 64, 1000, ids=2),
    _case("top-32", 127, 64, 1000, ids=32, ignored_ids=0.2),
    _case("everything", 127, 64, 1000, bias=True, **_EVERYTHING),
    *softmax_cases(_of_logits),
    _of_logits("peaked among several", 127, 0, 2049, target_prob=0.999, ids=4),
    _of_logits("top-32", 127, 0, 1000, ids=32, ignored_ids=0.2),
    _of_logits("everything", 127, 0, 1000, **_EVERYTHING),
)
LLAMA = "llama3.1-8b"
# What `onchip bench` runs: a model's head, with entropy and without.
SUITES = {
    "cpu": (_case("cpu", 1024, 512, 16384), _case("cpu-entropy", 1024, 512, 16384, entropy=True)),
    "cuda": (_case(LLAMA, 8192, *MODELS[LLAMA]), _case(f"{LLAMA}-entropy", 8192, *MODELS[LLAMA], entropy=True)),
    "lengths": (_case(f"{LLAMA}-lengths", 8192, *MODELS[LLAMA]),),
    "others": tuple(_case(name, 8192, h, v) for name, (h, v) in MODELS.items() if name != LLAMA),
}
