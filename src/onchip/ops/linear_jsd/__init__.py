r"""Generalised Jensen-Shannon divergence between a student's and a teacher's next-token distributions.

With z the student's and u the teacher's logits (hidden @ weight.T + bias, or given), both divided by `temperature`,
s = softmax(z), t = softmax(u), m = (1 - b) s + b t, the loss of a token is

    L = (1 - b) KL(s || m) + b KL(t || m)                    0 < b < 1
    L = KL(t || s)   (forward KL)                            b = 0
    L = KL(s || t)   (reverse KL)                            b = 1

The ends are special cases, not limits: with b JSD_b goes to 0, and JSD_b / b to KL(t || s).  The gradients are

    dL/dz = (1 - b) s (log(s / m) - KL(s || m))              dL/du = b t (log(t / m) - KL(t || m))
    dL/dz = s - t                                            dL/du = t (log(t / s) - KL(t || s))            b = 0
    dL/dz = s (log(s / t) - KL(s || t))                      dL/du = t - s                                  b = 1

divided by `temperature`.  Note that (1 - b)(s - m) isn't the first of them: it is the gradient of b (1 - b) KL(t || s).

With d = log t - log s and x = log1p(c expm1(-|d|)), where c is b for d <= 0 and 1 - b for d > 0, the computation uses
log(m / s) = x + max(d, 0) and log(m / t) = x - min(d, 0).  Nothing overflows, and d = 0 gives exact zeros.  The loss is
the sum of -(1 - b) s log(m / s) - b t log(m / t), at the ends of t d - t + s and its mirror image.  Each of these terms
is 0 or more, and an error in a log-sum-exp enters their sum only in second order.

Sources: GKD (arXiv:2306.13649), for generalised JSD in distillation; Hinton et al. (arXiv:1503.02531), for the
temperature and its square; Liger Kernel (arXiv:2410.10989), for chunks of tokens whose gradients are computed in
forward.

The computation is in `onchip.vocab`; docs/architecture.md shows what lives where.
"""
