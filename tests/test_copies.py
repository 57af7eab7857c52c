"""Copies that inputs' strides force are counted in the memory that an op needs, for every op that makes any."""

import re
from functools import partial

import pytest
import torch

from launched import Recorder, on_h100
from onchip.torch import jsd, linear_cross_entropy, linear_jsd, linear_log_probs

IDS = torch.zeros(2, 8, dtype=torch.int64)
OPS = {
    "linear_cross_entropy": lambda h, w, **how: linear_cross_entropy(h, w, IDS, **how),
    "linear_log_probs": lambda h, w, **how: linear_log_probs(h, w, IDS, **how),
    "linear_jsd, student": lambda h, w, **how: linear_jsd(h, w, PLAIN, ROWS[len(w)], **how),
    "linear_jsd, teacher": lambda h, w, **how: linear_jsd(PLAIN, ROWS[len(w)], h, w, **how),
}
PLAIN = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
ROWS = {v: torch.zeros(v, 64, dtype=torch.bfloat16) for v in (70, 72)}


def needed(call, backend, **how):
    """The bytes that a call with a budget of one byte asks for."""
    with on_h100(Recorder()), pytest.raises(ValueError, match="is too small") as caught:
        call(backend=backend, scratch_bytes=1, **how)
    return int(re.search(r"needs (\d+) bytes", str(caught.value))[1])


def shifted(*shape):
    """[..., N, C] whose leading dimensions are not one in memory."""
    *first, n, c = shape
    return torch.zeros(*first, n + 1, c, dtype=torch.bfloat16)[..., :-1, :]


@pytest.mark.parametrize("backend", ["plain", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_of_a_linear_layer(op, backend):
    def more(hidden, weight):
        call, plain = partial(OPS[op], hidden, weight), partial(OPS[op], PLAIN, ROWS[len(weight)])
        return needed(call, backend) - needed(plain, backend)

    assert more(shifted(2, 8, 64), ROWS[72]) == 2 * 16 * 64
    assert more(PLAIN.permute(2, 0, 1).contiguous().permute(1, 2, 0), ROWS[72]) == 0  # one stride of tokens
    assert more(PLAIN, torch.zeros(64, 72, dtype=torch.bfloat16).T) == 0
    copied = 2 * 70 * 64 if backend == "triton" else 0
    # Its columns don't begin at multiples of 16 bytes.
    assert more(PLAIN, torch.zeros(64, 70, dtype=torch.bfloat16).T) == copied
    assert more(PLAIN, torch.zeros(70, 64, 2, dtype=torch.bfloat16)[..., 0]) == copied


def test_of_fp8_products():
    weight = ROWS[72]
    calls = [partial(OPS["linear_cross_entropy"], h, weight, precision="fp8") for h in (shifted(2, 8, 64), PLAIN)]
    more, plain = (needed(call, "plain") for call in calls)
    assert more - plain == 2 * 16 * 64


@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_of_logits(backend):
    plain = torch.zeros(2, 8, 70, dtype=torch.bfloat16)
    apart = torch.zeros(2, 8, 70, 2, dtype=torch.bfloat16)[..., 0]
    one, other, both, columns = (
        needed(partial(jsd, *pair), backend) - needed(partial(jsd, plain, plain), backend)
        for pair in (
            (shifted(2, 8, 70), plain),
            (plain, shifted(2, 8, 70)),
            (shifted(2, 8, 70), shifted(2, 8, 70)),
            (apart, plain),
        )
    )
    assert one == other == columns == (2 * 16 * 70 if backend == "triton" else 0)
    assert both == 2 * one
