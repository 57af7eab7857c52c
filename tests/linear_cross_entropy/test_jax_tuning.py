"""What `onchip tune --framework jax` tries, lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from onchip.kernels.mosaic.product import SHARED_BYTES, MosaicConfig
from onchip.ops.linear_cross_entropy.cases import Case
from onchip.tune import linear_cross_entropy_jax as jax_tuning
from onchip.tune.log import config_key
from onchip.vocab.mosaic import memory as mosaic_spec
from shared_jax import quick_compilation  # noqa: F401


def test_candidates():
    heuristic = mosaic_spec.heuristic_tiles()
    assert set(jax_tuning.KERNELS) == set(heuristic)
    for kernel in jax_tuning.KERNELS:
        tried = jax_tuning.candidates(kernel, jax_tuning.CASES["llama3.1-8b"], "bfloat16")
        assert tried[0] == heuristic[kernel]
        assert len({config_key(c) for c in tried}) == len(tried) <= 16
        assert all(jax_tuning.shared_bytes(kernel, c, "bfloat16") <= SHARED_BYTES for c in tried)
    assert all(min(jax_tuning.sizes(case).values()) >= 1 for case in jax_tuning.CASES.values())


@pytest.mark.parametrize("kernel", jax_tuning.KERNELS)
def test_kernels_lower(kernel):
    # The vocabulary's last tile is not full, and hidden no multiple of 256.
    case = jax_tuning.CASES["gpt-oss-120b"]
    problem = jax.eval_shape(partial(jax_tuning.make_problem, kernel, case, "cuda", "bfloat16"))
    for numbers in (jax_tuning.candidates(kernel, case, "bfloat16")[i] for i in (0, -1)):
        run = partial(jax_tuning._RUNS[kernel], MosaicConfig.from_numbers(numbers))
        jax.jit(run).trace(problem).lower(lowering_platforms=("cuda",))


def test_a_right_result_passes_and_a_wrong_one_does_not():
    kernel, case = "mosaic_gradient_tiles", Case("tiny", 100, 128, 512)
    problem = jax_tuning.make_problem(kernel, case, "cpu", "bfloat16")
    reference = jax_tuning.reference(kernel, problem)
    # Tokens are rows inside of a block, and blocks of one part of the vocabulary lie side by side.
    laid_out = jax_tuning._to_boxes(reference[0])
    assert (laid_out[64:128, :64] == reference[0][:64, 64:128]).all()
    assert (laid_out[:64, 64:128] == reference[0][64:128, :64]).all()
    for out, right in ((laid_out, True), (1.05 * laid_out, False), (laid_out.at[0, 0].set(jnp.nan), False)):
        error, bound = jax_tuning.check(kernel, reference, [out.astype(jnp.bfloat16)])
        assert (error <= bound) == right
