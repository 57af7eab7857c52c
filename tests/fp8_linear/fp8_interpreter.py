"""Mends what Triton's interpreter gets wrong in FP8: rounding from float32, and NaN as an operand of a product.

For tests only, in processes where TRITON_INTERPRET=1 was set before Triton was imported.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from onchip.ops.fp8_linear import reference

FORMATS = {tl.float8e4nv: "e4m3", tl.float8e5: "e5m2"}


def mend():
    """Use the oracle's rounding and decoding from here on."""
    to_other, dot = InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_dot

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        fmt = FORMATS.get(dst_type.scalar)
        if fmt is None:
            return to_other(self, src, dst_type, rounding_mode)
        assert src.dtype.scalar == tl.float32
        return TensorHandle(reference.encode(src.data, fmt), dst_type.scalar)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = FORMATS.get(a.dtype.scalar), FORMATS.get(b.dtype.scalar)
        if left is None or right is None:
            return dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        x, y = (reference.decode(t.data, fmt).astype(np.float32) for t, fmt in ((a, left), (b, right)))
        return TensorHandle(np.matmul(x, y) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot
