r"""Linear layer in blockwise FP8 whose three products, for the output and both gradients, multiply FP8 numbers.

A group of numbers whose largest magnitude is a is divided by its scale s = a / 448 and rounded to E4M3 (on request
gradients take a / 57344 and E5M2); s = 1 for a group of zeros.  Groups are 1x128 along the contraction for activations
and gradients, and 128x128 for weights.  With Q for quantising, and products of dequantised values in float32:

    y  = Q_1x128(x) Q_128x128(w)^T + b
    dx = Q_1x128(dy) Q_128x128(w)
    dw = Q_128x1(dy)^T Q_128x1(x)         db = sum of dy over rows, of the unquantised numbers

Products are summed in float32 over 128 elements first, then scaled and added up.  All three are written as A B^T on
copies that the quantiser has transposed, since Hopper's FP8 instructions read operands along the contraction only.

Sources: the recipe is that of DeepSeek-V3 (arXiv:2412.19437); E4M3 and E5M2 are those of arXiv:2209.05433.

The computation is in `onchip.fp8`; docs/architecture.md shows what lives where.
"""
