"""The interpreter that is sped up computes what Triton's own does, to the bit."""

import itertools
import os
import subprocess
import sys

NUMBERS = (0, 1, -3, 2**31, 2**40, 2**70, True, 0.0, -0.0, 0.3, float("nan"), float("inf"), 1e-40, 1e39)
LEFT, RIGHT = ((), (4, 1)), ((), (4, 1), (1, 4), (4,))
DTYPES = ("int1", "int32", "int64", "uint32", "float16", "float32", "bfloat16", "pointer")


def test_operators():
    """In a process of its own: Triton reads the variable when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def operands(shapes):
    """Tensors of every dtype and shape, with numbers of both signs and none that overflows; and Python's numbers."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype, tl

    for name, shape in itertools.product(DTYPES, shapes):
        dtype = tl.core.pointer_type(tl.float16) if name == "pointer" else getattr(tl, name)
        data = (np.arange(1, 1 + int(np.prod(shape))) % 5 - (1 if "u" not in name else 0)).reshape(shape or (1,))
        handle = TensorHandle(data.astype(_get_np_dtype(dtype)), dtype)
        yield tl.core.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)
    yield from NUMBERS
    yield from map(tl.constexpr, (5, 0.5))


def results(names):
    """What each operator makes of each pair, or that it refuses, where Triton has put its functions for kernels."""
    from triton.runtime import interpreter

    scope = {"tl": interpreter.tl}
    exec("def kernel(): pass", scope)
    patched, made = interpreter._patch_lang(scope["kernel"]), []
    pairs = [*itertools.product(names, operands(LEFT), operands(RIGHT))]
    pairs += itertools.product(["to"], operands(LEFT), (getattr(interpreter.tl, x) for x in DTYPES[:-1]))
    for name, a, b in pairs:
        if not isinstance(a, interpreter.tl.core.tensor):
            continue
        try:
            out = getattr(a, name)(b)
            data = out.handle.data
            said = str(out.type), [x.value for x in out.shape], str(out.handle.dtype), data.dtype, data.shape
            said += (data.tobytes(),)
        except Exception:
            said = "refused"
        made.append(((name, str(a.type), str(b.type) if hasattr(b, "type") else repr(b)), said))
    patched.restore()
    return made


def compare():
    import numpy as np

    import interpreter_operators as operators
    from interpreter import speed_up

    names = [*operators.OPERATORS, *operators.TURNED]
    with np.errstate(all="ignore"):
        own = results(names)
        speed_up()
        ours = results(names)
    assert sum(said != "refused" for _, said in own) > len(own) // 4
    for (which, right), (_, made) in zip(own, ours, strict=True):
        assert made == right, f"{which}: {made}, not {right}"


if __name__ == "__main__":
    compare()
