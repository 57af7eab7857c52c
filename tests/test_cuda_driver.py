"""Calls to a made-up CUDA driver; packed_launches.py tests launches."""

import ctypes
from functools import partial

import pytest

from onchip.core.cuda_driver import Driver


def made_up(said):
    """A driver whose functions note down their arguments, and a function that returns these errors in turn."""
    calls, errors = [], iter(said)

    def call(name, *args):
        calls.append((name, *args))
        return next(errors) if name == "fill" else 0

    names = ("launch", "encode", "parameter", "fill", "retain", "use")
    return Driver(*[partial(call, name) for name in names], 13000), calls


def test_a_thread_that_has_not_used_the_device_gets_its_context():
    driver, calls = made_up([201, 0])
    driver.checked("zeros", 3, driver.fill, 16, 0)
    (first, *_), (retain, _, device), (use, _), (again, *given) = calls
    assert (first, retain, use, again) == ("fill", "retain", "use", "fill")
    assert (device, given) == (3, [16, 0])


@pytest.mark.parametrize("said", [[700], [201, 700]])
def test_an_error_says_what_was_refused(said):
    driver, calls = made_up(said)
    with pytest.raises(RuntimeError, match="zeros: CUDA's driver refused the call with error 700"):
        driver.checked("zeros", 0, driver.fill, ctypes.c_void_p())
    assert [name for name, *_ in calls].count("fill") == len(said)
