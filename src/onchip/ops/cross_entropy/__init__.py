r"""Cross-entropy of logits that exist already, of any dtype, strides and vocabulary, with little extra memory.

For token t with given logits x_t, a_tv = x_tv * logit_scale.  Everything else is as in linear_cross_entropy: the
transformed logits z, the loss, and its gradients with respect to z and a.

Forward keeps lse_t and log p_ty; backward computes p again from x and lse, a chunk of rows at a time, and takes the
target's p - 1 as expm1(log p).  For a reduced loss the Triton kernels compute the gradient in forward, while a row is
in the caches.

Sources: Liger Kernel (arXiv:2410.10989), for a backward that needs the log-sum-exp alone and a gradient that may take
the logits' memory; PaLM (arXiv:2204.02311), for z-loss; Gemma 2 (arXiv:2408.00118), for softcap.

The computation is in `onchip.vocab.rows`; docs/architecture.md shows what lives where.
"""
