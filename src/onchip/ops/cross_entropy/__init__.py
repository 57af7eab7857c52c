r"""Cross-entropy from logits that exist already: one loss for any dtype, strides and vocabulary, little memory beside.

For token t with given logits x_t, a_tv = x_tv * logit_scale.  All else is as in linear_cross_entropy: the transformed
logits z, the loss and its gradients by z and a.

Forward keeps lse_t and log p_ty; backward makes p again from x and lse, a chunk of rows at a time, and takes the
target's p - 1 as expm1(log p).  The Triton kernels make the gradient of a reduced loss in forward, while a row is in
the caches.

Sources: that the log-sum-exp is all that backward needs, and that its gradient may take the logits' memory, are as in
Liger Kernel (arXiv:2410.10989).  z-loss: PaLM (arXiv:2204.02311).  Softcap: Gemma 2 (arXiv:2408.00118).

What computes it is in `onchip.vocab.rows`; docs/architecture.md shows what lives where.
"""
