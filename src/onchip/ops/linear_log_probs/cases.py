"""Named problems after real models and with awkward numbers, used by the tests, `onchip check` and `onchip bench`."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import cases
from onchip.oracle.cases import MODELS, named_case


@dataclass(frozen=True)
class Case(cases.Case):
    """One problem: its shape, what its numbers look like, and the options that it passes to the op."""

    ids: int = 0
    """K, ids per token; 0 for one, without a dimension of its own."""
    ignored_ids: float = 0.0
    """Fraction of the single ids that are ignore_index, beside those of ignored tokens."""


class Inputs(NamedTuple):
    """Arrays of one case; floats are float32, and what the case doesn't have is None."""

    hidden: npt.NDArray[np.float32]  # [T, H]
    weight: npt.NDArray[np.float32]  # [V, H]
    ids: npt.NDArray[np.int64]  # [T] or [T, K]
    bias: npt.NDArray[np.float32] | None  # [V]
    temperature: npt.NDArray[np.float32] | None  # [T]
    grad_log_prob: npt.NDArray[np.float32]  # as ids
    grad_entropy: npt.NDArray[np.float32]  # [T]
    grad_lse: npt.NDArray[np.float32]  # [T]


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs: as linear_cross_entropy's, whose target is the first id, and upstream gradients ~ N(0, 1).

    Every fourth token of several ids has its first id twice.
    """
    made = cases.make_inputs(case, seed)
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
    return Inputs(
        made.hidden,
        made.weight,
        ids.astype(np.int64),
        made.bias,
        made.temperature,
        rng.standard_normal(ids.shape, dtype=np.float32),
        rng.standard_normal(case.tokens, dtype=np.float32),
        rng.standard_normal(case.tokens, dtype=np.float32),
    )


_case = partial(named_case, Case)

# `onchip check`: small enough for two CPU cores, awkward on purpose.  Small logits show padding mistakes that large
# ones hide; ragged sizes show masking mistakes.
CHECK_CASES = (
    _case("aligned", 256, 128, 1024),
    _case("ragged", 127, 31, 2049),
    _case("small logits", 127, 31, 2049, logit_std=0.02),
    _case("large logits", 127, 520, 2049, logit_std=30.0),
    _case("offset 1e4", 127, 31, 2049, logit_offset=1e4),
    _case("peaked", 127, 520, 2049, target_prob=0.999),
    _case("peaked among several", 127, 520, 2049, target_prob=0.999, ids=4),
    _case("gpt-2 vocab", 127, 31, 50257, zipf=True),
    _case("one class", 127, 31, 1),
    _case("two ids", 127, 64, 1000, ids=2),
    _case("top-32", 127, 64, 1000, ids=32, ignored_ids=0.2),
    _case("half ignored", 127, 64, 1000, ignored=0.5),
    _case("all ignored", 127, 64, 1000, ignored=1.0),
    _case("masked vocab", 127, 64, 1000, masked=600),
    _case("softcap", 127, 64, 1000, logit_std=30.0, softcap=15.0),
    _case("small logits, softcap 30", 127, 64, 1000, logit_std=0.02, softcap=30.0),
    _case("softcap 1e4", 127, 64, 1000, softcap=1e4),
    _case("logit scale", 127, 64, 1000, logit_scale=0.0625),
    _case("temperature", 127, 64, 1000, temperature=0.7),
    _case("token temperature", 127, 64, 1000, token_temperature=True),
    _case(
        "everything",
        127,
        64,
        1000,
        bias=True,
        ids=3,
        ignored=0.3,
        ignored_ids=0.2,
        token_temperature=True,
        softcap=15.0,
        logit_scale=0.5,
    ),
)
# The cases that `onchip bench` runs unless told otherwise, by device type: a model's head, with entropy and without.
_CPU_CASES = (_case("cpu", 1024, 512, 16384), _case("cpu-entropy", 1024, 512, 16384, entropy=True))
LLAMA = "llama3.1-8b"
_CUDA_CASES = (_case(LLAMA, 8192, *MODELS[LLAMA]), _case(f"{LLAMA}-entropy", 8192, *MODELS[LLAMA], entropy=True))
# Only where they are named.
OTHER_CASES = tuple(_case(name, 8192, h, v) for name, (h, v) in MODELS.items() if name != LLAMA)
BENCH_CASES = {case.name: case for case in (*_CPU_CASES, *_CUDA_CASES, *OTHER_CASES)}
DEFAULT_BENCH_CASES = {
    "cpu": tuple(case.name for case in _CPU_CASES),
    "cuda": tuple(case.name for case in _CUDA_CASES),
}
