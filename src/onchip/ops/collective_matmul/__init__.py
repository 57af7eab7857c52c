r"""Linear layers whose tokens are split over the ranks of a group: products that overlap with communication.

Each rank r of n has its own weight W_r.  `all_gather_matmul` takes tokens x_r on each rank, and multiplies all of them,
x = [x_0; ...; x_{n-1}]:

    y_r = x W_r^T + b_r

`matmul_reduce_scatter` takes all tokens on each rank, with that rank's features x_r.  The products are summed over the
ranks, and rank r gets its piece of the tokens:

    [y_0; ...; y_{n-1}] = sum over r of x_r W_r^T + b

These are a column-parallel and a row-parallel linear layer with sequence parallelism.  Each is the other's gradient.
With g_r the gradient of y_r, the first has the gradients

    dx_r = piece r of sum over q of g_q W_q        dW_r = g_r^T x        db_r = sum of g_r over tokens

and, with g = [g_0; ...; g_{n-1}], the second

    dx_r = g W_r        dW_r = g^T x_r        db = sum of g over tokens

Each product is computed in n pieces, one block of tokens each.  Blocks go around a ring of ranks, and while one is
multiplied, the next arrives.

Sources: the overlap of pieces is from Wang et al., "Overlap Communication with Dependent Computation via Decomposition
in Large Deep Learning Models" (ASPLOS 2023); the two layers are from Megatron-LM's sequence parallelism (Korthikanti et
al., arXiv:2205.05198).

The ring is in `onchip.collectives`; docs/architecture.md shows what lives where.
"""
