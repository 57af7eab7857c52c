"""Which functions a call goes through."""

import sys


def our_functions():
    """The functions of onchip that are on the stack, from the outermost on."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("onchip."):
            frames.append(frame.f_code)
        frame = frame.f_back
    return [code.co_name for code in dict.fromkeys(reversed(frames))]
