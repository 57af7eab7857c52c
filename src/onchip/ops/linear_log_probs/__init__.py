r"""Per-token log-probabilities of given ids from hidden states and a head; the [tokens, vocab] logits are never stored.

For token t with hidden state h_t, ids y_tk and temperature tau_t:

    a_tv  = (h_t . w_v + b_v) * logit_scale
    z_tv  = softcap * tanh(a_tv / softcap) / tau_t          (a_tv / tau_t without softcap)
    lse_t = log sum_v exp z_tv,    p = softmax(z)
    log_prob_tk = z_t,y_tk - lse_t
    entropy_t   = -sum_v p_tv log p_tv = lse_t - mean_t,    mean_t = sum_v p_tv z_tv
    mean_logits_t      = 1/V sum_v z_tv
    log_sum_sq_probs_t = log sum_v p_tv^2 = log sum_v exp(2 z_tv) - 2 lse_t

and for upstream gradients g_tk of log_prob, gH_t of entropy and gL_t of lse:

    d / d z_tv = sum_k g_tk ([v = y_tk] - p_tv) - gH_t p_tv (z_tv - mean_t) + gL_t p_tv
    d z_tv / d a_tv = (1 - tanh(a_tv / softcap)^2) / tau_t

where z_tv - mean_t equals log p_tv + entropy_t, but loses no digits by adding two nearly opposite numbers.

The running softmax keeps the largest logit and the sum of the exponentials of all *others*, so that
log_prob = -log1p(others) keeps its digits if an id is nearly certain, whichever of the ids that is.  In the gradient,
an id's own part is g (1 - p) with 1 - p = -expm1(log p).

Sources: Milakov and Gimelshein (arXiv:1805.02867), for the running softmax; Cut Cross-Entropy (arXiv:2411.09009), for
recomputing from the log-sum-exp; Gemma 2 (arXiv:2408.00118), for softcap.

The computation is in `onchip.vocab`; docs/architecture.md shows what lives where.
"""
