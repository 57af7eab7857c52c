"""What two or more ops share.  It imports no op; whatever names one takes its name as `op`.

spec.py            options' checks, shape checks of a linear layer, sizes of chunks; no framework
cases.py           models, and the random inputs of problems with a softmax; no framework
checks.py          a comparison with an oracle and its bounds; no framework
torch_inputs.py    what PyTorch's public functions check
torch_tiles.py     a tile of logits in PyTorch: which tokens count, products, running softmax, gradient
torch_autograd.py  what autograd formulas share
torch_checks.py    plain expressions in PyTorch that an op is held against
jax_call.py        what a front end in JAX hands to a backend
jax_inputs.py      what JAX's public functions check
jax_tiles.py       a tile of logits in JAX: which tokens count, products, running softmax, gradient
jax_checks.py      plain expressions in JAX that an op is held against
"""
