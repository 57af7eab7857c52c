"""GPUs that times are predicted for: what was measured on an H100, and scaled for the others.  No framework."""

from typing import NamedTuple

from onchip.vocab.triton.costs import RATES, Rates

# TFLOP/s of cuBLAS's blockwise FP8 products (output and input's gradient, weight's gradient), and TB/s that the
# quantiser reads and writes: results/2026-11-22-h100-fp8_linear.json.
_FP8_PRODUCT, _FP8_WEIGHT_PRODUCT, _FP8_QUANTISED = 1275.0, 975.0, 2.9

# Of grouped products in bfloat16 on an H100: TFLOP/s, and TB/s of the groups' weights that are read or written beside;
# of output, x's gradient and weight's.  Fitted to even groups in results/2026-11-24-h100-grouped_matmul*.json, which
# are within 11%, 9% and 3%.
_GROUPED = ((955.0, 4.6), (935.0, 5.0), (875.0, 4.4))


class Gpu(NamedTuple):
    """One GPU by its data sheet."""

    title: str
    capability: tuple[int, int]
    product: float
    """TFLOP/s of bfloat16 products that are summed in float32, without sparsity."""
    memory: float
    """TB/s."""
    multiprocessors: int
    source: str
    """Where its times come from."""


_SCALED = (
    "Times are a guess: rates measured on an H100, scaled by the data sheets' TFLOP/s and memory bandwidth. Nothing "
    "was measured on this GPU."
)
GPUS = {
    "h100": Gpu("H100 SXM 80GB", (9, 0), 989, 3.35, 132, "Times are predicted with rates measured on an H100 SXM."),
    "h200": Gpu(
        "H200 SXM", (9, 0), 989, 4.8, 132, "Times are predicted with an H100's measured rates and the H200's memory "
        "bandwidth from the data sheet; runs on an H200 took 8% less to 9% more.",
    ),
    "a100": Gpu("A100 SXM 80GB", (8, 0), 312, 2.04, 108, _SCALED),
    "l40s": Gpu("L40S", (8, 9), 362, 0.864, 142, _SCALED),
    "4090": Gpu("GeForce RTX 4090", (8, 9), 165, 1.01, 128, _SCALED),
    "b200": Gpu("B200 SXM", (10, 0), 2250, 8.0, 148, _SCALED),
}  # fmt: skip
_MEASURED = GPUS["h100"]


def faster_products(gpu: str) -> float:
    """How many times faster its products are than an H100's."""
    return GPUS[gpu].product / _MEASURED.product


def faster_memory(gpu: str) -> float:
    """How many times faster its memory is than an H100's."""
    return GPUS[gpu].memory / _MEASURED.memory


def rates(gpu: str) -> Rates:
    """The rates of the Triton kernels' cost model: computing goes by the products' rate, storing by the memory's."""
    measured, product, memory = RATES["h100"], faster_products(gpu), faster_memory(gpu)
    return measured._replace(
        product=measured.product * product,
        softmax=measured.softmax / product,
        again=measured.again / product,
        keep=measured.keep / memory,
        add=measured.add / memory,
        accumulate=measured.accumulate / memory,
        programs=GPUS[gpu].multiprocessors,
    )


def product_ms(gpu: str, multiplications: int) -> float:
    """Of a product in bfloat16 or float16, with so many multiplications."""
    return 2e-9 * multiplications / rates(gpu).product


def fp8_ms(gpu: str, outputs: int, weights: int, quantised: int) -> float | None:
    """Of FP8 products with so many multiplications, those of a weight's gradient apart, and of so many bytes that are
    read or written beside them.  None where cuBLAS has no such products.
    """
    if GPUS[gpu].capability != (9, 0):
        return None
    moved = quantised / (_FP8_QUANTISED * faster_memory(gpu))
    return 2e-9 * (outputs / _FP8_PRODUCT + weights / _FP8_WEIGHT_PRODUCT) + 1e-9 * moved


def grouped_ms(gpu: str, multiplications: int, weight_bytes: int, *, gradients: bool) -> float:
    """Of grouped products with so many multiplications each: one, or three with gradients."""
    products, memory = faster_products(gpu), faster_memory(gpu)
    of = _GROUPED if gradients else _GROUPED[:1]
    return 1e-9 * sum(2 * multiplications / (rate * products) + weight_bytes / (beside * memory) for rate, beside in of)
