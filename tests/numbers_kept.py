"""How exact a kernel's function of a float32 array is.  Imports no framework."""

import numpy as np

ENDS = [0.0, 1.0, 1 + 2.0**-12, 1 + 3 * 2.0**-12, 3.4e38, 3.4028e38, np.inf, np.nan]


def assert_rounds(function, digits):
    """`function` of a float32 array keeps so many binary digits, NaN and infinity; what is too large is infinite."""
    x = np.concatenate([np.logspace(-37, 38, 2029), np.linspace(1, 4, 2044), ENDS]).astype(np.float32)
    x = np.concatenate([x, -x, np.zeros(-2 * len(x) % 1024, np.float32)])
    made = function(x)
    assert (np.isnan(made) == np.isnan(x)).all()
    assert (np.isinf(made) == (np.abs(x) > 3.4025e38)).all()
    finite = np.abs(x) < 3.4025e38
    error = np.abs(made[finite].astype(np.float64) - x[finite])
    assert (error <= 2.0**-digits * np.abs(x[finite])).all()
    assert error.max() > 0


SIZES = [0.0, 1e-45, 1e-40, 1e-30, 0.3999999, 0.4, 0.4000001, 20.0, 3e38, np.inf, np.nan]


def assert_is_tanh(function):
    """`function` of a float32 array, and the derivative that is made of its result."""
    x = np.concatenate([np.logspace(-38, 2, 9001), np.linspace(0, 10, 7361), SIZES]).astype(np.float32)
    x = np.concatenate([x, -x, np.zeros(-2 * len(x) % 1024, np.float32)])
    made, right = function(x), np.tanh(x.astype(np.float64))
    assert (np.isnan(made) == np.isnan(x)).all()
    finite = ~np.isnan(x)
    eps, tiny = np.finfo(np.float32).eps, np.finfo(np.float32).tiny  # subnormals may count as 0
    assert (np.abs(made - right) <= 8 * eps * np.abs(right) + tiny)[finite].all()
    assert (np.abs((1 - made * made) - (1 - right * right)) <= 8 * eps * right * right + eps)[finite].all()
