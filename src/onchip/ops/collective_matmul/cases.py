"""Named problems, used by the tests and by `onchip check`: whole ones, which the ranks share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

# How many ranks can share all cases: tokens, N and K are multiples of these.
RANKS = (1, 2, 3, 4, 6, 8, 12, 24)


@dataclass(frozen=True)
class CollectiveCase:
    """One problem: the sizes of all ranks together."""

    name: str
    tokens: int
    n: int
    k: int
    bias: bool = False
    middle: int | None = None
    """x is [T, middle, K]."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


class CollectiveInputs(NamedTuple):
    """The arrays of one case; None where the case has no such array."""

    x: Float32  # [T, K] or [T, middle, K]
    weight: Float32  # [N, K]
    bias: Float32 | None  # [N]
    grad_out: Float32  # [T, N] or [T, middle, N]


def make_inputs(case: CollectiveCase, seed: int = 0) -> CollectiveInputs:
    """Random inputs of `case`: x ~ N(0, 1), weight ~ N(0, 1 / sqrt(K))."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float = 1.0) -> Float32:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    rows = (case.tokens,) if case.middle is None else (case.tokens, case.middle)
    bias = normal(case.n) if case.bias else None
    return CollectiveInputs(
        normal(*rows, case.k), normal(case.n, case.k, std=case.k**-0.5), bias, normal(*rows, case.n)
    )


CHECK_CASES = (
    CollectiveCase("square", 96, 96, 96),
    CollectiveCase("one of each", 24, 24, 24),
    CollectiveCase("wide", 48, 240, 72),
    CollectiveCase("deep", 48, 72, 480, bias=True),
    CollectiveCase("no tokens", 0, 24, 48),
    CollectiveCase("three dimensions", 24, 48, 72, bias=True, middle=5),
)


@dataclass(frozen=True)
class CollectiveBenchCase:
    """A linear layer that the ranks share, and how."""

    name: str
    op: str
    """ "all_gather_matmul" or "matmul_reduce_scatter"."""
    tokens: int
    n: int
    k: int


def _both(name: str, tokens: int, hidden: int, wide: int) -> tuple[CollectiveBenchCase, CollectiveBenchCase]:
    """The layers of an MLP: to all ranks' parts of its middle, and back."""
    return (
        CollectiveBenchCase(f"{name}-up", "all_gather_matmul", tokens, wide, hidden),
        CollectiveBenchCase(f"{name}-down", "matmul_reduce_scatter", tokens, hidden, wide),
    )


# What `onchip bench` runs: gate and up in one; "world" has one of them.
SUITES = {
    "cpu": _both("cpu", 384, 192, 768),
    "world": (
        *_both("llama3.1-8b-t8192", 8192, 4096, 14336),
        *_both("llama3.1-70b-t16384", 16384, 8192, 28672),
    ),
    "cuda": (
        *_both("llama3.1-8b", 8192, 4096, 28672),
        *_both("llama3.1-70b", 8192, 8192, 57344),
        *_both("llama3.1-70b-t2048", 2048, 8192, 57344),
    ),
}
