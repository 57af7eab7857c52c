"""`python -m fuzz`: random legal calls of every op, compared with the float64 oracles.

They vary sizes (0, 1 and ragged ones), strides, dtypes, autocast, all options at once, strategies, backends, budgets
from the least on, the strides of upstream gradients, and which inputs need gradients, under jit and not.  An exception
or a warning counts as a failure, and so does a refusal, since all calls that are drawn are legal.

The first call that fails is simplified as long as it fails in the same way, and printed as a program that makes only
this call: what it doesn't name has its simplest value.
"""
