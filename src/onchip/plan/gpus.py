"""GPUs to plan for, and the times that were measured on an H100 and an H200.  Imports no framework."""

from typing import NamedTuple

from onchip.vocab.triton.costs import RATES, Rates

# TFLOP/s of cuBLAS's blockwise FP8 products (output and input's gradient, weight's gradient), and TB/s that the
# quantiser reads and writes: results/2026-11-22-h100-fp8_linear.json.
_FP8_PRODUCT, _FP8_WEIGHT_PRODUCT, _FP8_QUANTISED = 1275.0, 975.0, 2.9


class Gpu(NamedTuple):
    """One GPU."""

    title: str
    capability: tuple[int, int]
    faster_memory: float | None = None
    """How many times faster its memory is than an H100's, by the data sheets; None where no times were measured."""
    source: str = ""
    """Where its times come from."""


GPUS = {
    "h100": Gpu("H100 SXM 80GB", (9, 0), 1.0, "Times are predicted with rates measured on an H100 SXM."),
    "h200": Gpu(
        "H200 SXM", (9, 0), 4.8 / 3.35, "Times are predicted with an H100's measured rates and the H200's memory "
        "bandwidth from the data sheet; runs on an H200 took 8% less to 9% more.",
    ),
    "a100": Gpu("A100 SXM 80GB", (8, 0)),
    "l40s": Gpu("L40S", (8, 9)),
    "4090": Gpu("GeForce RTX 4090", (8, 9)),
    "b200": Gpu("B200 SXM", (10, 0)),
}  # fmt: skip


def faster_memory(gpu: str) -> float:
    """`Gpu.faster_memory` of a GPU that has measured times."""
    faster = GPUS[gpu].faster_memory
    assert faster is not None
    return faster


def rates(gpu: str) -> Rates:
    """The rates of the Triton kernels' cost model; those of stores scale with the memory's."""
    measured, memory = RATES["h100"], faster_memory(gpu)
    keep, add, accumulate = (rate / memory for rate in (measured.keep, measured.add, measured.accumulate))
    return measured._replace(keep=keep, add=add, accumulate=accumulate)


def product_ms(multiplications: int) -> float:
    """The time of a product in bfloat16 or float16, with so many multiplications."""
    return 2e-9 * multiplications / RATES["h100"].product


def fp8_ms(gpu: str, outputs: int, weights: int, quantised: int) -> float:
    """The time of FP8 products and of the quantiser.

    `outputs` and `weights` are multiplications: those of outputs and input's gradient, and those of a weight's
    gradient.  `quantised` is how many bytes the quantiser reads and writes.
    """
    moved = quantised / (_FP8_QUANTISED * faster_memory(gpu))
    return 2e-9 * (outputs / _FP8_PRODUCT + weights / _FP8_WEIGHT_PRODUCT) + 1e-9 * moved
