r"""Cross-entropy from logits that exist already: one loss for any dtype, strides and vocabulary, little memory beside.

For token t with logits x_t, target y_t and temperature tau_t:

    a_tv  = x_tv * logit_scale
    z_tv  = softcap * tanh(a_tv / softcap) / tau_t          (a_tv / tau_t without softcap)
    lse_t = log sum_v exp z_tv
    loss_t = (1 - eps) (lse_t - z_ty) + eps (lse_t - mean_v z_tv) + z_loss lse_t^2

with eps = label_smoothing, and with p = softmax(z), for an upstream gradient g_t of loss_t:

    d loss / d z_tv = g_t (p_tv (1 + 2 z_loss lse_t) - (1 - eps) [v = y_t] - eps / V)
    d z_tv / d x_tv = (1 - tanh(a_tv / softcap)^2) logit_scale / tau_t

Forward keeps lse_t and log p_ty; backward makes p again from x and lse, a chunk of rows at a time, and takes the
target's p - 1 as expm1(log p).  The Triton kernels make the gradient of a reduced loss in forward, while a row is in
the caches.  The loss is that of linear_cross_entropy, and so is the arithmetic: see there.

Sources: that the log-sum-exp is all that backward needs, and that its gradient may take the logits' memory, are as in
Liger Kernel (arXiv:2410.10989).  z-loss: PaLM (arXiv:2204.02311).  Softcap: Gemma 2 (arXiv:2408.00118).

What computes it is in `onchip.vocab.rows`; docs/architecture.md shows what lives where.
"""
