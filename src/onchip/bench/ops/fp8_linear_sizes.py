"""What the benchmarks of both frameworks share: the layer's modes, what a result is checked by, sizes, the summary.

No framework.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.core.sizes import DTYPE_BYTES
from onchip.fp8 import numbers
from onchip.ops.fp8_linear.cases import Case

# What each mode of the layer returns.
LAYER = {"forward": ("out",), "forward+backward": ("out", "grad_x", "grad_weight")}
# The noise that FP8 may add, as a relative error: 28 dB below the signal.
BOUND = 10 ** (-28 / 20)
# So many rows of each result are checked in all of their columns; half of them are the last ones, which in a result of
# more than 2**31 elements lie past that.
_CHECKED_ROWS = 128
# Elements of an operand in float32 at a time: 1 GiB.
CHUNK = 1 << 28
# The layers whose speed-ups are summed up: in smaller ones, quantising takes a large part of the time.
LEAST_SIZE = 4096


def shapes(m: int, n: int, k: int) -> dict[str, tuple[int, int]]:
    """Of each result."""
    return {"out": (m, n), "grad_x": (m, k), "grad_weight": (n, k)}


def checked_rows(shapes: Mapping[str, tuple[int, int]]) -> dict[str, npt.NDArray[np.int64]]:
    """Which rows of each result are checked, in order: random ones and the last ones."""
    rng = np.random.default_rng(0)
    half = _CHECKED_ROWS // 2
    return {
        name: np.union1d(rng.integers(rows, size=half), np.arange(max(0, rows - half), rows))
        for name, (rows, _) in shapes.items()
    }


def chunks(rows: int, columns: int) -> list[slice]:
    """Rows of a matrix that are in float32 at a time."""
    step = max(1, CHUNK // columns)
    return [slice(i, i + step) for i in range(0, rows, step)]


def plain_bytes(case: Case, dtype: str) -> int:
    """Device memory of inputs and results."""
    return 2 * DTYPE_BYTES[dtype] * (case.m * case.k + case.n * case.k + case.m * case.n)


def quantized_bytes(case: Case, dtype: str) -> int:
    """Device memory of all that a step quantises."""
    p = numbers.Problem(case.m, case.n, case.k, dtype)
    of_x = numbers.quantized_bytes(case.m, case.k) + numbers.quantized_bytes(case.k, case.m)
    return of_x + numbers.gradient_bytes(p) + numbers.weight_bytes(p)


def require_memory(needed: int, there: int | None) -> None:
    """Raise MemoryError if so many bytes aren't there; None is for a device of which nobody asks."""
    if there is not None and needed > there:
        raise MemoryError(f"it needs {needed} bytes of device memory; {there} are there")


def summary(
    rows: Sequence[Mapping[str, Any]], cases: Mapping[str, Case], baselines: Mapping[str, str]
) -> list[dict[str, Any]]:
    """How much faster each implementation is than that of `baselines` for the mode.

    Geometric mean and minimum over the cases that have both times in a dtype, and N and K of `LEAST_SIZE` or more.
    """
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        case = cases[row["case"]]
        if row["median_ms"] is not None and min(case.n, case.k) >= LEAST_SIZE:
            times.setdefault((row["mode"], row["dtype"], row["impl"]), {})[row["case"]] = row["median_ms"]
    lines = []
    for (mode, dtype, impl), mine in times.items():
        alike = (b for b in times if b[:2] == (mode, dtype) and b[2].startswith(f"{baselines[mode]} "))
        baseline = next(alike, None)
        if baseline is None or baseline[2] == impl:
            continue
        gains = {case: times[baseline][case] / ms for case, ms in mine.items() if case in times[baseline]}
        if gains:
            least = min(gains, key=lambda case: gains[case])
            mean = math.exp(math.fsum(map(math.log, gains.values())) / len(gains))
            lines.append(
                {
                    "mode": mode,
                    "dtype": dtype,
                    "implementation": impl,
                    "times_faster_than": baseline[2],
                    "cases": len(gains),
                    "least_N_and_K": LEAST_SIZE,
                    "geometric_mean": mean,
                    "least": gains[least],
                    "least_case": least,
                }
            )
    return lines
