"""What `onchip tune --framework jax` tries, lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from onchip.kernels.mosaic.product import MosaicConfig
from onchip.tune import linear_cross_entropy_jax as jax_tuning


@pytest.mark.parametrize("kernel", jax_tuning.KERNELS)
def test_kernels_lower(kernel):
    # The vocabulary's last tile is not full, and hidden no multiple of 256.
    sizes = jax_tuning.CASES["gpt-oss-120b"]
    problem = jax.eval_shape(partial(jax_tuning.make_problem, kernel, "cuda", "bfloat16", **sizes))
    for numbers in (jax_tuning.candidates(kernel)[i] for i in (0, -1)):
        run = partial(jax_tuning._RUNS[kernel], MosaicConfig.from_numbers(numbers))
        jax.jit(run).trace(problem).lower(lowering_platforms=("cuda",))


def test_a_right_result_passes_and_a_wrong_one_does_not():
    kernel = "mosaic_gradient_tiles"
    problem = jax_tuning.make_problem(kernel, "cpu", "bfloat16", tokens=100, hidden=128, vocab=512)
    reference = jax_tuning.reference(kernel, problem)
    # Tokens are rows inside of a block, and blocks of one part of the vocabulary lie side by side.
    laid_out = jax_tuning._to_boxes(reference[0])
    assert (laid_out[64:128, :64] == reference[0][:64, 64:128]).all()
    assert (laid_out[:64, 64:128] == reference[0][64:128, :64]).all()
    for out, right in ((laid_out, True), (1.05 * laid_out, False), (laid_out.at[0, 0].set(jnp.nan), False)):
        error, bound = jax_tuning.check(kernel, reference, [out.astype(jnp.bfloat16)])
        assert (error <= bound) == right
