import numpy as np
import pytest

from onchip.core.backends import choose_backend
from onchip.frontend.options import require_one_of

REFUSALS = {"fast": "needs a bigger GPU", "plain": None}


def test_auto_takes_the_first_that_can():
    assert choose_backend("op", "auto", REFUSALS) == "plain"
    assert choose_backend("op", "auto", {"fast": None, "plain": None}) == "fast"


def test_a_named_backend_never_falls_back():
    assert choose_backend("op", "plain", REFUSALS) == "plain"
    assert choose_backend("op", "torch", REFUSALS) == "plain"  # another name for it
    with pytest.raises(ValueError, match="op: backend 'fast' can't run this call: needs a bigger GPU"):
        choose_backend("op", "fast", REFUSALS)


def test_auto_with_nothing_left_gives_every_reason():
    with pytest.raises(ValueError, match=r"no backend can run this call \(fast: needs a bigger GPU; plain: too old\)"):
        choose_backend("op", "auto", REFUSALS | {"plain": "too old"})


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'fast', 'plain'; got 'slow'"):
        choose_backend("op", "slow", REFUSALS)
    for array in (np.zeros((2, 3)), [1, 2], None):
        with pytest.raises(ValueError, match="backend must be one of 'auto', 'fast', 'plain'; got"):
            choose_backend("op", array, REFUSALS)
        with pytest.raises(ValueError, match="op: reduction must be one of 'mean', 'sum'; got"):
            require_one_of("op", "reduction", array, ("mean", "sum"))
