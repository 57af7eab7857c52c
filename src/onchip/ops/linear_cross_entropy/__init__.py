r"""Linear layer and cross-entropy in one op; the [tokens, vocab] logits are never stored.

For token t with hidden state h_t, target y_t and temperature tau_t:

    a_tv  = (h_t . w_v + b_v) * logit_scale
    z_tv  = softcap * tanh(a_tv / softcap) / tau_t          (a_tv / tau_t without softcap)
    lse_t = log sum_v exp z_tv
    loss_t = (1 - eps) (lse_t - z_ty) + eps (lse_t - mean_v z_tv) + z_loss lse_t^2

with eps = label_smoothing, and with p = softmax(z), for an upstream gradient g_t of loss_t:

    d loss / d z_tv = g_t (p_tv (1 + 2 z_loss lse_t) - (1 - eps) [v = y_t] - eps / V)
    d z_tv / d a_tv = (1 - tanh(a_tv / softcap)^2) / tau_t

Sources: the loss over chunks of tokens is that of Liger Kernel (arXiv:2410.10989), the recomputation from the
log-sum-exp that of Cut Cross-Entropy (arXiv:2411.09009), and the running softmax that of Milakov and Gimelshein
(arXiv:1805.02867).  That the softmax of a tile is taken in the epilogue of its product is from Cut Cross-Entropy too.
z-loss: PaLM (arXiv:2204.02311).  Softcap: Gemma 2 (arXiv:2408.00118).

    spec.py           options, memory formulas, choice of strategy and chunks; no framework
    reference.py      the contract in NumPy float64, with gradients
    torch_op.py       PyTorch: the public function and module; the operators and autograd of the 'torch' backend
    torch_inputs.py   what the public function checks
    torch_tiles.py    the computation with PyTorch's own matrix products, a tile at a time
    triton_op.py      the operators and autograd of the 'triton' backend
    triton_spec.py    its memory formulas, cost model and plans; no framework
    triton_setup.py   the memory that forward leaves for backward, and what a call runs with
    triton_walks.py   what is launched, in which order
    triton_launches.py   each launch, and the memory that it works on
    triton_softmax.py, triton_gradients.py   the kernels of forward and of backward; triton_blocks.py, what they share
    fp8_op.py         precision='fp8': the operators and autograd; fp8_spec.py, its chunks and memory formulas
    fp8_torch.py      a chunk's softmax and its gradient in FP8 with PyTorch's operations; fp8_launches.py,
                      fp8_kernels.py, by Triton's kernels
    jax_op.py         JAX: the public function, its derivative rules, the choice of a backend
    jax_inputs.py     what the public function checks
    jax_call.py       the interface of all of JAX's backends
    jax_xla.py        the 'xla' backend: its walks in plain JAX; jax_spec.py, their memory formulas and plans
    jax_positions.py  what the backends with kernels share: tokens by position, merging, the parts of backward
    mosaic_op.py      the 'mosaic_gpu' backend; mosaic_spec.py, its memory formulas and plans
    mosaic_kernels.py, mosaic_settle.py   its kernels; mosaic_blocks.py, what they share
    jax_triton.py     the 'triton' backend of JAX; jax_triton_calls.py, the kernels as jax-triton calls them
    cases.py          named problems for tests, `onchip check` and `onchip bench`
    checks.py         the comparison with the oracle that tests and `onchip check` run, in both frameworks
    tuning.py, jax_tuning.py   what `onchip tune` tries: the Triton and the Mosaic kernels

What a walk does with one tile is in `onchip.vocab`; what the public functions check alike in `onchip.frontend`.
"""
