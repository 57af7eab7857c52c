"""Named problems, with real models' sizes or awkward numbers, for the tests and `onchip check`."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import cases
from onchip.oracle.cases import draw_factors, ignore_some, named_case

Float = npt.NDArray[np.float32]


@dataclass(frozen=True)
class JsdCase(cases.Case):
    """One problem.  `vocab` is the number of entries that both models have; the options on logits are the student's.

    With `masked` entries, that many first ones have a bias of -inf in both models, and as many after them only in the
    student.
    """

    teacher_hidden: int = 0
    """The teacher's hidden size; 0: as the student's."""
    student: str = "hidden"
    """"hidden" for `linear_jsd`, "logits" for `jsd`."""
    teacher: str = "hidden"
    """"hidden", "logits", or a top-k of 8 with this rest: "tail", "truncated" or "renormalised"."""
    noise: float | None = None
    """How far the teacher's hidden states are off, if it is the student itself; None: it is a model of its own."""
    padding: tuple[int, int] = (0, 0)
    """Entries behind `vocab` in the student and in the teacher."""

    def __post_init__(self) -> None:
        if any(self.padding):
            object.__setattr__(self, "options", {**self.options, "vocab": self.vocab})


class JsdInputs(NamedTuple):
    """The arrays of one case; None where the case has no such array."""

    student_hidden: Float | None
    student_weight: Float | None
    student_bias: Float | None
    student_logits: Float | None
    teacher_hidden: Float | None
    teacher_weight: Float | None
    teacher_bias: Float | None
    teacher_logits: Float | None
    topk: tuple[npt.NDArray[np.int64], Float, str, str] | None
    target: npt.NDArray[np.int64] | None
    token_weight: Float | None
    grad_loss: Float


def make_inputs(case: JsdCase, seed: int = 0) -> JsdInputs:
    """Random inputs of `case`: hidden ~ N(0, 1), weight ~ N(0, logit_std / sqrt(H)), the rest as the case says."""
    rng = np.random.default_rng(seed)
    tokens, vocab = case.tokens, case.vocab

    def normal(*shape: int) -> Float:
        return rng.standard_normal(shape, dtype=np.float32)

    def head(size: int, padding: int) -> tuple[Float, Float]:
        return normal(tokens, size), normal(vocab + padding, size) * np.float32(case.logit_std / size**0.5)

    h, w = head(case.hidden, case.padding[0])
    x, v = head(case.teacher_hidden or case.hidden, case.padding[1])
    if case.noise is not None:
        x, v = h + normal(*h.shape) * np.float32(case.noise), w
    b = c = None
    if case.bias or case.masked or case.logit_offset:
        b = normal(len(w)) * np.float32(case.bias) + np.float32(case.logit_offset)
        c = normal(len(v)) * np.float32(case.bias)
        b[: 2 * case.masked] = -np.inf
        c[: case.masked] = -np.inf
    z = h @ w.T + (0 if b is None else b)
    u = x @ v.T + (0 if c is None else c)
    topk = None
    if case.teacher not in ("hidden", "logits"):
        u64 = u[:, :vocab].astype(np.float64) / case.options.get("temperature", 1.0)
        log_p = u64 - np.log(np.exp(u64 - u64.max(1, keepdims=True)).sum(1, keepdims=True)) - u64.max(1, keepdims=True)
        indices = np.argsort(-log_p, 1, kind="stable")[:, :8].astype(np.int64)
        topk = (indices, np.take_along_axis(log_p, indices, 1).astype(np.float32), "log_probs", case.teacher)
    target = None
    if case.ignored or "hard_weight" in case.options:
        target = rng.integers(2 * case.masked, vocab, size=tokens)
        ignore_some(case, target, rng)
    token_weight, _, grad_loss = draw_factors(case, rng)
    dense = case.teacher == case.student == "hidden"
    student: Any = (h, w, b, None) if case.student == "hidden" else (None, None, None, z)
    teacher: Any = (x, v, c, None) if dense else (None, None, None, u if topk is None else None)
    return JsdInputs(*student, *teacher, topk, target, token_weight, grad_loss)  # type: ignore[call-arg]


_case = partial(named_case, JsdCase)
_EVERYTHING = {"teacher_hidden": 40, "bias": True, "padding": (8, 24), "ignored": 0.3, "token_weight": True}
_EVERYTHING |= {"beta": 0.3, "temperature": 1.5, "temperature_squared": True, "hard_weight": 0.2, "normalizer": 50}
# `onchip check`: small enough for two CPU cores, awkward on purpose.  Small logits show padding mistakes that large
# ones hide; ragged sizes show masking mistakes; close models show cancellation.
CHECK_CASES = (
    _case("aligned", 64, 64, 512),
    _case("ragged", 61, 31, 1025, teacher_hidden=40),
    *(_case(f"beta {b}", 61, 31, 500, beta=b) for b in (0.0, 0.1, 0.9, 1.0)),
    _case("small logits", 61, 31, 1025, logit_std=0.02),
    *(_case(f"large logits, beta {b}", 61, 260, 500, logit_std=30.0, beta=b) for b in (0.0, 1.0)),
    _case("large logits, near models", 61, 260, 500, logit_std=30.0, noise=0.05),
    _case("offset 1e4", 61, 31, 500, logit_offset=1e4),
    *(_case(f"close models, beta {b}", 61, 40, 500, noise=0.01, beta=b) for b in (0.0, 0.5, 1.0)),
    _case("equal models", 61, 40, 500, noise=0.0),
    _case("gpt-2 vocab", 9, 31, 50257),
    _case("one class", 61, 31, 1),
    _case("sum", 61, 40, 500, reduction="sum"),
    _case("per token", 61, 40, 500, reduction="none"),
    _case("half ignored", 61, 40, 500, ignored=0.5),
    _case("all ignored", 61, 40, 500, ignored=1.0),
    _case("token weights", 61, 40, 500, token_weight=True),
    _case("bias", 61, 40, 500, bias=True),
    _case("masked vocab", 61, 40, 500, masked=150),
    _case("temperature", 61, 40, 500, temperature=2.0, temperature_squared=True),
    _case("hard labels", 61, 40, 500, temperature=2.0, hard_weight=0.3),
    _case("padded vocab", 61, 40, 500, padding=(24, 88)),
    _case("teacher's logits", 61, 40, 500, teacher="logits"),
    *(_case(f"top-k, {x}", 61, 40, 500, teacher=x, logit_std=3.0) for x in ("tail", "truncated", "renormalised")),
    *(_case(f"logits, beta {b}", 61, 31, 500, student="logits", teacher="logits", beta=b) for b in (0.0, 0.3, 1.0)),
    _case("everything", 61, 40, 500, **_EVERYTHING),
)
# What `onchip bench` runs: llama3.1-8b's head as both models, then models with hidden sizes of their own, named student
# and teacher.
SUITES = {
    "cpu": tuple(_case(f"cpu-beta-{b}", 512, 256, 8192, beta=b) for b in (0.5, 0.0, 1.0)),
    "cuda": (
        *(_case(f"llama3.1-8b-beta-{b}", 4096, 4096, 128256, beta=b) for b in (0.5, 0.0, 1.0)),
        _case("llama3.2-1b-llama3.1-8b", 4096, 2048, 128256, teacher_hidden=4096),
    ),
    "lengths": (_case("llama3.1-8b-lengths", 8192, 4096, 128256, beta=0.5),),
    "others": (
        _case("qwen3-0.6b-qwen3-8b", 4096, 1024, 151936, teacher_hidden=4096),
        _case("qwen3-8b-qwen3-32b", 4096, 4096, 151936, teacher_hidden=5120),
        _case("gemma3-1b-gemma3-4b", 4096, 1152, 262144, teacher_hidden=2560),
    ),
}
