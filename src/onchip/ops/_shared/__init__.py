"""What two or more ops share.

It imports no op; whatever speaks in an op's name takes that as its first argument, `op`.

    spec.py            options' checks, shape checks of a linear layer, sizes of chunks; no framework
    reference.py       the softmax of logits and cross-entropy from it in float64: what oracles are made of
    cases.py           models, and the random inputs of problems with a softmax; no framework
    checks.py          a comparison with an oracle and its bounds; no framework
    torch_inputs.py    what PyTorch's public functions check
    torch_tiles.py     a tile of logits in PyTorch: which tokens count, products, running softmax, gradient
    torch_autograd.py  what autograd formulas share
    torch_checks.py    plain expressions in PyTorch that an op is held against
    triton_calls.py    a device that can run Triton's kernels, and a launch
    triton_maths.py    functions of kernels of softmax losses
    triton_tiles.py    blocks and tiles of kernels that are matrix products
    bench_peers.py     what a benchmark compares with, and how close results must be; no framework
    torch_bench.py     steps of a benchmark in PyTorch, and the comparison with a reference
    jax_call.py        what a front end in JAX hands to a backend
    jax_inputs.py      what JAX's public functions check
    jax_tiles.py       a tile of logits in JAX: which tokens count, products, running softmax, gradient
    mosaic_product.py  the persistent product that the Mosaic GPU kernels of JAX are made of
    mosaic_registers.py   layouts of values in their registers
    jax_checks.py      plain expressions in JAX that an op is held against
    jax_peers.py       what a benchmark in JAX compares with; JAX is imported late
    jax_bench.py       inputs and steps of a benchmark in JAX, and the comparison with a reference
"""
