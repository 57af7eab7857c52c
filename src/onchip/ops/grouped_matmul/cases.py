"""Named problems after real models and with awkward sizes, used by the tests, `onchip check` and benchmarks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class GroupedCase:
    """One problem: its sizes, and the options that it passes to the op."""

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int
    tail: int = 0
    """Rows past the last group's."""
    bias: bool = False
    row_scale: bool = False
    source_rows: int | None = None
    """x has so many rows, and `rows` says which are read."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the op: activation, gate_up, num_rows."""

    def __str__(self) -> str:
        return self.name

    @property
    def tokens(self) -> int:
        return sum(self.sizes) + self.tail

    @property
    def groups(self) -> int:
        return len(self.sizes)


class GroupedInputs(NamedTuple):
    """The arrays of one case; None where the case has no such array."""

    x: Float32  # [T, K] or [M, K]
    weight: Float32  # [G, N, K]
    group_sizes: Int32  # [G]
    bias: Float32 | None  # [G, N]
    row_scale: Float32 | None  # [T]
    rows: Int32 | None  # [T]
    scatter_rows: Int32 | None  # [T]
    grad_out: Float32


def make_inputs(case: GroupedCase, seed: int = 0) -> GroupedInputs:
    """Random inputs of `case`: x ~ N(0, 1), weight ~ N(0, 1 / sqrt(K)), row scales in [0, 1]."""
    rng = np.random.default_rng(seed)
    tokens, num_rows = case.tokens, case.options.get("num_rows")

    def normal(*shape: int, std: float = 1.0) -> Float32:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    columns = case.n // 2 if "activation" in case.options else case.n
    return GroupedInputs(
        x=normal(tokens if case.source_rows is None else case.source_rows, case.k),
        weight=normal(len(case.sizes), case.n, case.k, std=case.k**-0.5),
        group_sizes=np.array(case.sizes, np.int32),
        bias=normal(len(case.sizes), case.n) if case.bias else None,
        row_scale=rng.random(tokens, np.float32) if case.row_scale else None,
        rows=None if case.source_rows is None else rng.integers(0, case.source_rows, tokens, np.int32),
        scatter_rows=None if num_rows is None else rng.integers(0, num_rows, tokens, np.int32),
        grad_out=normal(tokens if num_rows is None else num_rows, columns),
    )


SWIGLU = {"activation": "swiglu"}
# `onchip check`: small enough for two CPU cores, awkward on purpose.
CHECK_CASES = (
    GroupedCase("even", (64, 64, 64, 64), 128, 64),
    GroupedCase("ragged", (3, 150, 1, 46), 72, 40),
    GroupedCase("odd sizes", (17, 0, 130), 31, 13, tail=5),
    GroupedCase("all in one group", (0, 0, 140, 0), 64, 48),
    GroupedCase("no rows", (0, 0, 0), 32, 16, options={**SWIGLU, "gate_up": "interleaved"}),
    GroupedCase("all groups empty", (0, 0), 32, 16, tail=20),
    GroupedCase("many groups", tuple(i % 4 for i in range(70)), 48, 24, tail=3),
    GroupedCase("one number", (1,), 1, 1),
    GroupedCase("bias", (20, 0, 44), 40, 24, tail=6, bias=True),
    GroupedCase("row scales", (20, 0, 44), 40, 24, tail=6, row_scale=True),
    GroupedCase("rows", (20, 0, 44), 40, 24, tail=6, source_rows=16),
    GroupedCase("scatter", (20, 0, 44), 40, 24, tail=6, row_scale=True, options={"num_rows": 19}),
    GroupedCase("swiglu", (20, 0, 44), 80, 24, tail=6, options=SWIGLU),
    GroupedCase("interleaved", (20, 0, 44), 72, 24, bias=True, options={**SWIGLU, "gate_up": "interleaved"}),
    GroupedCase("everything", (50, 0, 130, 7), 88, 56, tail=9, bias=True, row_scale=True, source_rows=70,
         options={**SWIGLU, "num_rows": 75}),
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The expert layers of a published model, and so many rows of tokens, each token counted once for each expert."""

    name: str
    tokens: int
    groups: int
    k: int
    n: int


MODELS = (
    Model("mixtral-8x7b", 16384, 8, 4096, 14336),
    Model("deepseek-v3-ep4", 32768, 64, 7168, 2048),
    Model("deepseek-v3", 32768, 256, 7168, 2048),
    Model("qwen3-30b-a3b", 65536, 128, 2048, 768),
)


def even(tokens: int, groups: int) -> tuple[int, ...]:
    """All groups have the same size, except for a remainder."""
    return tuple(tokens * (i + 1) // groups - tokens * i // groups for i in range(groups))


def skewed(tokens: int, groups: int) -> tuple[int, ...]:
    """Sizes in proportion to 1 / rank."""
    shares = np.cumsum(1 / np.arange(1, groups + 1))
    ends = np.floor(tokens * shares / shares[-1] + 0.5).astype(int)
    return tuple(int(x) for x in np.diff(ends, prepend=0))


def half_empty(tokens: int, groups: int) -> tuple[int, ...]:
    """Every other group has no rows."""
    return tuple(size for each in even(tokens, groups // 2) for size in (each, 0))


MODEL_CASES = tuple(
    GroupedCase(f"{m.name}-{sizes.__name__}", sizes(m.tokens, m.groups), m.n, m.k)
    for m in MODELS
    for sizes in (even, skewed, half_empty)
)
# What `onchip bench` runs.
SUITES = {
    "cpu": (GroupedCase("cpu", skewed(512, 8), 256, 192),),
    "cuda": MODEL_CASES,
    "lengths": (GroupedCase("qwen3-30b-a3b-up-lengths", skewed(65536, 128), 1536, 2048),),
}
