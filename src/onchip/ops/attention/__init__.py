r"""Softmax attention under a mask that is data.

For query i and head h, with k and v of head h // group, over the keys j that the mask lets i see,

    s_ij = scale q_i . k_j,        z_ij = softcap tanh(s_ij / softcap), or s_ij
    lse_i = log(exp(sink_h) + sum_j exp(z_ij)),        p_ij = exp(z_ij - lse_i),        out_i = sum_j p_ij v_j

without the first term if there are no sinks.  A query that sees no key has out 0 and lse -inf, or its sink.  With the
upstream gradients dout and dlse,

    delta_i = dout_i . out_i,        dz_ij = p_ij (dout_i . v_j - delta_i + dlse_i)
    dv_j = sum_i p_ij dout_i,        dsink_h = sum_i exp(sink_h - lse_i) (dlse_i - delta_i)
    dq_i = scale sum_j dz_ij z'_ij k_j,        dk_j = scale sum_i dz_ij z'_ij q_i

with z' = 1 - (z / softcap)^2, or 1.

Sources: FlashAttention (arXiv:2205.14135), for computing the softmax again in backward; gpt-oss, for the sinks.
"""
