r"""Linear layer in blockwise FP8 whose three products, output and both gradients, multiply FP8 numbers.

A group of numbers with the largest magnitude a is divided by its scale s = a / 448 and rounded to E4M3 (a / 57344 and
E5M2 for gradients on request); s = 1 for a group of zeros.  Groups are 1x128 along the contraction for activations and
gradients, and 128x128 for weights.  With Q for quantising, and products of dequantised values in float32:

    y  = Q_1x128(x) Q_128x128(w)^T + b
    dx = Q_1x128(dy) Q_128x128(w)
    dw = Q_128x1(dy)^T Q_128x1(x)         db = sum of dy over rows, of the unquantised numbers

Products are summed in float32 over 128 elements first, then scaled and added up.  All three are written as A B^T on
copies that the quantiser has transposed, since Hopper's FP8 instructions read operands along the contraction only.

Sources: the recipe is that of DeepSeek-V3 (arXiv:2412.19437); E4M3 and E5M2 are those of arXiv:2209.05433.

    spec.py            options, shapes, memory formulas; no framework
    reference.py       the contract in NumPy, with gradients
    torch_op.py        PyTorch: the public functions, the operators and autograd
    torch_module.py    Fp8Linear, and turning a model's linear layers into it
    torch_inputs.py    what the public functions check
    torch_quantize.py  quantising with PyTorch's own operations; the layout of what is quantised
    torch_products.py  the products of the backends 'dequantize' and 'scaled_mm'
    cublas.py          a product that cuBLAS adds to a main gradient
    torch_weights.py   the weight of a call in FP8: made there, or given
    torch_unchanged.py keeping the weights of a model in FP8 while they do not change
    triton_op.py       which calls the kernels serve
    triton_spec.py     how they are cut, and their shared memory; no framework
    triton_kernels.py, triton_words.py, triton_launches.py   the kernels, the quantiser that is taken, and each launch
    triton_configs.py  stored configs of the products
    tuning.py          what `onchip tune` tries
    jax_op.py          JAX: the public function, its derivative rule, and the choice of a backend
    jax_quantize.py    quantising with JAX's own operations
    jax_xla.py         the backend 'xla': products of dequantised numbers
    mosaic_op.py       the backend 'mosaic_gpu': which calls it serves, and the operands of its products
    mosaic_kernels.py  its product, in Pallas
    cases.py           named problems for tests, `onchip check` and benchmarks
    checks.py          the comparison with the oracle that tests and `onchip check` run, in both frameworks
"""
