"""Correctness cases for problems with a softmax over a vocabulary, and their random inputs.  Imports no framework."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

AnyCase = TypeVar("AnyCase")

# Of a loss, as models are trained with them.
TERMS = {"label_smoothing": 0.1, "z_loss": 1e-4}

# Hidden size and vocabulary of published models: (H, V).
MODELS = {
    "llama3.1-8b": (4096, 128256),
    "qwen3-8b": (4096, 151936),
    "qwen3-32b": (5120, 151936),
    "gemma3-4b": (2560, 262144),
    "gpt-oss-120b": (2880, 201088),
    "deepseek-v3": (7168, 129280),
}


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The distribution of a problem's numbers, and the options that it passes to the op."""

    logit_std: float = 1.0
    """Standard deviation of the logits, before `logit_offset` and the options."""
    logit_offset: float = 0.0
    """Added to every logit; for a linear layer through the bias."""
    target_prob: float | None = None
    """The approximate probability of each token's target; None leaves it to chance."""
    zipf: bool = False
    """Targets follow Zipf's law, as words do; otherwise they are uniform."""
    ignored: float = 0.0
    """Fraction of the tokens whose target is ignore_index."""
    masked: int = 0
    """How many vocabulary entries, the first ones, are -inf; for a linear layer through the bias."""
    token_weight: bool = False
    class_weight: bool = False
    token_temperature: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the op: reduction, softcap, label_smoothing, ..."""


@dataclass(frozen=True)
class Case(Numbers):
    """A problem with a linear layer."""

    name: str
    tokens: int
    hidden: int
    vocab: int
    bias: bool = False

    def __str__(self) -> str:
        return self.name


class Inputs(NamedTuple):
    """Arrays of one case; floats are float32, and None stands for what the case doesn't have."""

    hidden: npt.NDArray[np.float32]  # [T, H]
    weight: npt.NDArray[np.float32]  # [V, H]
    target: npt.NDArray[np.int64]  # [T]
    bias: npt.NDArray[np.float32] | None  # [V]
    token_weight: npt.NDArray[np.float32] | None  # [T]
    temperature: npt.NDArray[np.float32] | None  # [T]
    grad_loss: npt.NDArray[np.float32]  # [T] for reduction="none", else []
    class_weight: npt.NDArray[np.float32] | None  # [V]


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs of `case`: hidden ~ N(0, 1), weight ~ N(0, logit_std / sqrt(H)), the rest as the case says."""
    rng = np.random.default_rng(seed)
    tokens, hidden_size, vocab = case.tokens, case.hidden, case.vocab
    hidden = rng.standard_normal((tokens, hidden_size), dtype=np.float32)
    weight = rng.standard_normal((vocab, hidden_size), dtype=np.float32) * np.float32(case.logit_std / hidden_size**0.5)
    first = min(case.masked, vocab - 1)
    target = draw_target(case, rng)
    if case.target_prob is not None:
        chosen = weight[target]
        missing = target_logit(case) - np.einsum("th,th->t", hidden, chosen)
        hidden += (missing / np.einsum("th,th->t", chosen, chosen))[:, None].astype(np.float32) * chosen
    bias = None
    if case.bias or case.masked or case.logit_offset:
        bias = rng.standard_normal(vocab, dtype=np.float32) * np.float32(case.bias) + np.float32(case.logit_offset)
        bias[:first] = -np.inf
    ignore_some(case, target, rng)
    return Inputs(hidden, weight, target, bias, *draw_factors(case, rng), draw_class_weight(case, rng))


# These take the cases of any op that has the fields.


def draw_target(case: Any, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """[T] vocabulary indices, none of them masked."""
    tokens, first = int(case.tokens), int(min(case.masked, case.vocab - 1))
    size = int(case.vocab) - first
    if not case.zipf:
        return first + rng.integers(size, size=tokens)
    rank = np.arange(1, size + 1)
    return first + rng.choice(size, size=tokens, p=(1 / rank) / (1 / rank).sum())


def ignore_some(case: Any, target: npt.NDArray[np.int64], rng: np.random.Generator) -> None:
    """Write ignore_index to the fraction of the tokens that the case gives."""
    target[rng.permutation(case.tokens)[: round(case.ignored * case.tokens)]] = case.options.get("ignore_index", -100)


def draw_factors(
    case: Any, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None, npt.NDArray[np.float32]]:
    """Token weights, token temperatures (None if the case has none) and the upstream gradient."""
    tokens, per_token = case.tokens, case.options.get("reduction") == "none"
    return (
        rng.random(tokens, dtype=np.float32) * 2 if case.token_weight else None,
        rng.uniform(0.5, 2, tokens).astype(np.float32) if case.token_temperature else None,
        rng.standard_normal(tokens if per_token else (), dtype=np.float32) + np.float32(not per_token),
    )


def draw_class_weight(case: Any, rng: np.random.Generator) -> npt.NDArray[np.float32] | None:
    """[V] around 1, and 0 for every seventh class but the first; None if the case has no class weights."""
    if not case.class_weight:
        return None
    made: npt.NDArray[np.float32] = rng.uniform(0.1, 2, case.vocab).astype(np.float32)
    made[7::7] = 0
    return made


def target_logit(case: Any) -> float:
    """The target's logit at which it has `target_prob`: the others' exponentials sum to about V exp(std^2 / 2)."""
    assert case.target_prob is not None
    return math.log(case.target_prob / (1 - case.target_prob) * case.vocab) + float(case.logit_std) ** 2 / 2


def named_case(kind: Callable[..., AnyCase], name: str, *sizes: int, **more: Any) -> AnyCase:
    """A case from its name, its sizes in their order, and more: fields of the case, or else options of the op."""
    fields = {k: more.pop(k) for k in list(more) if k in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    return kind(name, *sizes, **fields, options=more)


def softmax_cases(case: Callable[..., AnyCase]) -> tuple[AnyCase, ...]:
    """The cases that every op checks, made by `case(name, tokens, hidden, vocab, **more)`.

    They are small enough for two CPU cores, and awkward on purpose.  Small logits show padding mistakes that large ones
    hide; ragged sizes show masking mistakes.
    """
    return (
        case("aligned", 256, 128, 1024),
        case("ragged", 127, 31, 2049),
        case("small logits", 127, 31, 2049, logit_std=0.02),
        case("large logits", 127, 520, 2049, logit_std=30.0),
        case("offset 1e4", 127, 31, 2049, logit_offset=1e4),
        case("peaked", 127, 520, 2049, target_prob=0.999),
        case("gpt-2 vocab", 127, 31, 50257, zipf=True),
        case("one class", 127, 31, 1),
        case("half ignored", 127, 64, 1000, ignored=0.5),
        case("all ignored", 127, 64, 1000, ignored=1.0),
        case("masked vocab", 127, 64, 1000, masked=600),
        case("softcap", 127, 64, 1000, logit_std=30.0, softcap=15.0),
        case("small logits, softcap 30", 127, 64, 1000, logit_std=0.02, softcap=30.0),
        case("softcap 1e4", 127, 64, 1000, softcap=1e4),
        case("logit scale", 127, 64, 1000, logit_scale=0.0625),
        case("temperature", 127, 64, 1000, temperature=0.7),
        case("token temperature", 127, 64, 1000, token_temperature=True),
    )


def loss_cases(case: Callable[..., AnyCase], **more: Any) -> tuple[AnyCase, ...]:
    """The cases that every cross-entropy checks in addition; `more` is what else the op knows, for the case with
    everything.
    """
    everything = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 15.0, "logit_scale": 0.5, "normalizer": 100}
    per_token = {"ignored": 0.3, "token_weight": True, "token_temperature": True}
    return (
        case("sum", 127, 64, 1000, reduction="sum"),
        case("per token", 127, 64, 1000, reduction="none"),
        case("token weights", 127, 64, 1000, token_weight=True),
        case("class weights", 127, 64, 1000, class_weight=True, **per_token),
        case("label smoothing", 127, 64, 1000, label_smoothing=0.1),
        case("z-loss", 127, 64, 1000, z_loss=1e-3),
        case("everything", 127, 64, 1000, **everything, **per_token, **more),
    )


def class_cases(case: Callable[..., AnyCase], **more: Any) -> tuple[AnyCase, ...]:
    """Class weights that aren't factors of tokens' losses: what the frameworks' own products check in addition."""
    return (
        case("smoothed class weights", 127, 64, 1000, class_weight=True, label_smoothing=0.1, ignored=0.3),
        case("class weights, z-loss", 127, 64, 1000, class_weight=True, z_loss=1e-3, reduction="none"),
        case("all smoothed, classes", 127, 31, 70, class_weight=True, label_smoothing=1.0, token_weight=True, **more),
        case("one class, weighed", 127, 31, 1, class_weight=True, label_smoothing=0.1),
    )
