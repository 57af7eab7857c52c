"""Named problems after real models and with awkward numbers, used by the tests, `onchip check` and `onchip bench`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Hidden size and vocabulary of published models: (H, V).
MODELS = {
    "llama3.1-8b": (4096, 128256),
    "qwen3-8b": (4096, 151936),
    "qwen3-32b": (5120, 151936),
    "gemma3-4b": (2560, 262144),
    "gpt-oss-120b": (2880, 201088),
    "deepseek-v3": (7168, 129280),
}


@dataclass(frozen=True)
class Case:
    """One problem: its shape, what its numbers look like, and the options that it passes to the op."""

    name: str
    tokens: int
    hidden: int
    vocab: int
    logit_std: float = 1.0
    """Standard deviation of the logits, before `logit_offset` and the options."""
    logit_offset: float = 0.0
    """Added to every logit, through the bias."""
    target_prob: float | None = None
    """About the probability that each token's target gets; None leaves it to chance."""
    zipf: bool = False
    """Targets follow Zipf's law, as words do; otherwise they are uniform."""
    ignored: float = 0.0
    """Fraction of the tokens whose target is ignore_index."""
    masked: int = 0
    """So many vocabulary entries, the first ones, have a bias of -inf."""
    bias: bool = False
    token_weight: bool = False
    token_temperature: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the op: reduction, softcap, label_smoothing, ..."""

    def __str__(self) -> str:
        return self.name


class Inputs(NamedTuple):
    """Arrays of one case; floats are float32, and what the case doesn't have is None."""

    hidden: npt.NDArray[np.float32]  # [T, H]
    weight: npt.NDArray[np.float32]  # [V, H]
    target: npt.NDArray[np.int64]  # [T]
    bias: npt.NDArray[np.float32] | None  # [V]
    token_weight: npt.NDArray[np.float32] | None  # [T]
    temperature: npt.NDArray[np.float32] | None  # [T]
    grad_loss: npt.NDArray[np.float32]  # [T] for reduction="none", else []


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs of `case`: hidden ~ N(0, 1), weight ~ N(0, logit_std / sqrt(H)), the rest as the case says."""
    rng = np.random.default_rng(seed)
    tokens, hidden_size, vocab = case.tokens, case.hidden, case.vocab
    hidden = rng.standard_normal((tokens, hidden_size), dtype=np.float32)
    weight = rng.standard_normal((vocab, hidden_size), dtype=np.float32) * np.float32(case.logit_std / hidden_size**0.5)
    first = min(case.masked, vocab - 1)
    if case.zipf:
        rank = np.arange(1, vocab - first + 1)
        target = first + rng.choice(vocab - first, size=tokens, p=(1 / rank) / (1 / rank).sum())
    else:
        target = rng.integers(first, vocab, size=tokens)
    if case.target_prob is not None:
        chosen = weight[target]
        missing = target_logit(case) - np.einsum("th,th->t", hidden, chosen)
        hidden += (missing / np.einsum("th,th->t", chosen, chosen))[:, None].astype(np.float32) * chosen
    bias = None
    if case.bias or case.masked or case.logit_offset:
        bias = rng.standard_normal(vocab, dtype=np.float32) * np.float32(case.bias) + np.float32(case.logit_offset)
        bias[:first] = -np.inf
    ignore_index = case.options.get("ignore_index", -100)
    target[rng.permutation(tokens)[: round(case.ignored * tokens)]] = ignore_index
    per_token = case.options.get("reduction") == "none"
    return Inputs(
        hidden=hidden,
        weight=weight,
        target=target.astype(np.int64),
        bias=bias,
        token_weight=rng.random(tokens, dtype=np.float32) * 2 if case.token_weight else None,
        temperature=rng.uniform(0.5, 2, tokens).astype(np.float32) if case.token_temperature else None,
        grad_loss=rng.standard_normal(tokens if per_token else (), dtype=np.float32) + np.float32(not per_token),
    )


def target_logit(case: Case) -> float:
    """The target's logit that gives it `target_prob`: the others' exponentials sum to about V exp(std^2 / 2)."""
    assert case.target_prob is not None
    return math.log(case.target_prob / (1 - case.target_prob) * case.vocab) + case.logit_std**2 / 2


def _case(name: str, tokens: int, hidden: int, vocab: int, **more: Any) -> Case:
    fields = {k: more.pop(k) for k in list(more) if k in Case.__dataclass_fields__}
    return Case(name, tokens, hidden, vocab, **fields, options=more)


# `onchip check`: small enough for two CPU cores, awkward on purpose.  Small logits show padding mistakes that large
# ones hide; ragged sizes show masking mistakes.
CHECK_CASES = (
    _case("aligned", 256, 128, 1024),
    _case("ragged", 127, 31, 2049),
    _case("small logits", 127, 31, 2049, logit_std=0.02),
    _case("large logits", 127, 520, 2049, logit_std=30.0),
    _case("offset 1e4", 127, 31, 2049, logit_offset=1e4),
    _case("peaked", 127, 520, 2049, target_prob=0.999),
    _case("gpt-2 vocab", 127, 31, 50257, zipf=True),
    _case("one class", 127, 31, 1),
    _case("sum", 127, 64, 1000, reduction="sum"),
    _case("per token", 127, 64, 1000, reduction="none"),
    _case("half ignored", 127, 64, 1000, ignored=0.5),
    _case("all ignored", 127, 64, 1000, ignored=1.0),
    _case("token weights", 127, 64, 1000, token_weight=True),
    _case("bias", 127, 64, 1000, bias=True),
    _case("masked vocab", 127, 64, 1000, masked=600),
    _case("label smoothing", 127, 64, 1000, label_smoothing=0.1),
    _case("z-loss", 127, 64, 1000, z_loss=1e-3),
    _case("softcap", 127, 64, 1000, logit_std=30.0, softcap=15.0),
    _case("logit scale", 127, 64, 1000, logit_scale=0.0625),
    _case("temperature", 127, 64, 1000, temperature=0.7),
    _case("token temperature", 127, 64, 1000, token_temperature=True),
    _case(
        "everything",
        127,
        64,
        1000,
        bias=True,
        ignored=0.3,
        token_weight=True,
        token_temperature=True,
        label_smoothing=0.1,
        z_loss=1e-3,
        softcap=15.0,
        logit_scale=0.5,
        normalizer=100,
    ),
)
# The cases that `onchip bench` runs unless told otherwise, by device type.
CPU_CASE = _case("cpu", 4096, 1024, 32768)
VOCAB_SWEEP = tuple(_case(f"vocab-{v}", 2048, 512, v) for v in (2048, 4096, 8192, 16384, 32768))
TOKEN_SWEEP = tuple(_case(f"tokens-{t}", t, 512, 16384) for t in (256, 512, 1024, 2048, 4096))
# deepseek-v3 has the widest rows; with twice the tokens it is also the largest of the products.
MODEL_CASES = tuple(_case(name, 8192 if name == "deepseek-v3" else 4096, h, v) for name, (h, v) in MODELS.items())
LLAMA = "llama3.1-8b"
LLAMA_TOKEN_SWEEP = tuple(_case(f"{LLAMA}-t{t}", t, *MODELS[LLAMA]) for t in (1024, 4096, 8192, 16384, 32768))
LLAMA_VARIANTS = (
    _case(f"{LLAMA}-half-ignored", 4096, *MODELS[LLAMA], ignored=0.5),
    _case(f"{LLAMA}-zipf", 4096, *MODELS[LLAMA], zipf=True),
    _case(f"{LLAMA}-peaked", 4096, *MODELS[LLAMA], target_prob=0.999),
    _case(f"{LLAMA}-std30", 4096, *MODELS[LLAMA], logit_std=30.0),
)
_CUDA_CASES = (*MODEL_CASES, *LLAMA_VARIANTS, *LLAMA_TOKEN_SWEEP)
BENCH_CASES = {case.name: case for case in (CPU_CASE, *VOCAB_SWEEP, *TOKEN_SWEEP, *_CUDA_CASES)}
DEFAULT_BENCH_CASES = {"cpu": (CPU_CASE.name,), "cuda": tuple(case.name for case in _CUDA_CASES)}
