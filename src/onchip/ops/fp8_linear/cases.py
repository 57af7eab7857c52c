"""Named problems after real models and with awkward numbers, used by the tests, `onchip check` and benchmarks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

# Published models: the sequence length that they are trained with here, and [N, K] of their layers: q, k and v in one,
# the attention's output, gate and up in one, down.
MODELS: Mapping[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    "llama2-7b": (4096, ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008))),
    "llama2-70b": (4096, ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))),
    "llama3.1-8b": (8192, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
    "llama3.1-405b": (8192, ((18432, 16384), (16384, 16384), (106496, 16384), (16384, 53248))),
    "qwen2.5-7b": (8192, ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))),
    "qwen2.5-72b": (8192, ((10240, 8192), (8192, 8192), (59136, 8192), (8192, 29568))),
    "mistral-7b": (4096, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
}
LAYERS = ("qkv", "out", "gate-up", "down")
MICRO_BATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Fp8LinearCase:
    """One problem: its shape, what its numbers look like, and the options that it passes to the op."""

    name: str
    m: int
    n: int
    k: int
    bias: bool = False
    grad_std: float = 1.0
    """Standard deviation of the output's gradient."""
    spread: float = 0.0
    """Rows and columns of all three differ in size by factors of 2**-spread to 2**spread."""
    zeros: float = 0.0
    """Fraction of x's rows, and of the gradient's, that are 0, and of their columns."""
    snr_db: float | None = 28.0
    """What the signal-to-noise ratio of output and gradients against the unquantised layer must be, at least."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the op: grad_dtype, scale."""

    def __str__(self) -> str:
        return self.name


class Fp8LinearInputs(NamedTuple):
    """Arrays of one case, float32; what the case doesn't have is None."""

    x: Float32  # [M, K]
    weight: Float32  # [N, K]
    bias: Float32 | None  # [N]
    grad_out: Float32  # [M, N]


def make_inputs(case: Fp8LinearCase, seed: int = 0) -> Fp8LinearInputs:
    """Random inputs of `case`: x ~ N(0, 1), weight ~ N(0, 1 / sqrt(K)), the rest as the case says."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, std: float, zeros: float = 0.0) -> Float32:
        made = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)
        for size in ((rows, 1), (1, columns)):
            if case.spread:
                made *= np.exp2(rng.uniform(-case.spread, case.spread, size)).astype(np.float32)
            if zeros:
                made *= (rng.random(size) >= zeros).astype(np.float32)
        return made

    return Fp8LinearInputs(
        x=matrix(case.m, case.k, 1.0, case.zeros),
        weight=matrix(case.n, case.k, case.k**-0.5),
        bias=rng.standard_normal(case.n, dtype=np.float32) if case.bias else None,
        grad_out=matrix(case.m, case.n, case.grad_std, case.zeros),
    )


# `onchip check`: small enough for two CPU cores, awkward on purpose.  Groups of few numbers are quantised better than
# whole ones, and numbers of very different sizes worse: those cases ask for no ratio.
CHECK_CASES = (
    Fp8LinearCase("aligned", 256, 384, 512),
    Fp8LinearCase("ragged", 127, 131, 521),
    Fp8LinearCase("one row", 1, 130, 257),
    Fp8LinearCase("one column", 130, 1, 300),
    Fp8LinearCase("one feature", 200, 136, 1, snr_db=None),
    Fp8LinearCase("bias", 130, 200, 264, bias=True),
    Fp8LinearCase("wide spread", 130, 260, 264, spread=8.0, snr_db=None),
    Fp8LinearCase("zeros", 260, 260, 264, zeros=0.5, bias=True),
    Fp8LinearCase("tiny gradients", 130, 260, 264, grad_std=1e-30),
    Fp8LinearCase("e5m2 gradients", 130, 260, 264, snr_db=24.0, options={"grad_dtype": "e5m2"}),
    Fp8LinearCase("power-of-two scales", 130, 260, 264, options={"scale": "power_of_two"}),
    Fp8LinearCase("everything", 300, 264, 520, bias=True, spread=4.0, zeros=0.1, snr_db=None,
         options={"grad_dtype": "e5m2", "scale": "power_of_two"}),
)  # fmt: skip
# One layer of each kind of each model, with one to four sequences: the problems of Primus-Turbo's benchmark.
MODEL_CASES = tuple(
    Fp8LinearCase(f"{model}-{layer}-{batch}", sequence * batch, n, k)
    for model, (sequence, layers) in MODELS.items()
    for layer, (n, k) in zip(LAYERS, layers, strict=True)
    for batch in MICRO_BATCHES
)
# What `onchip bench` runs: by default of each model its widest layer, for one sequence.
SUITES = {
    "cpu": (Fp8LinearCase("cpu", 512, 768, 640),),
    "cuda": tuple(case for case in MODEL_CASES if case.name.endswith("-gate-up-1")),
    "lengths": (Fp8LinearCase("llama3.1-8b-gate-up-lengths", 8192, 28672, 4096),),
    "primus": MODEL_CASES,
}
