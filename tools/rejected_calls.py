"""Calls that mypy and pyright must reject, each on a line of its own that is marked; see tools/check_examples.py."""

import jax.numpy as jnp
import numpy as np
import torch

import onchip.jax
import onchip.torch
from onchip.integrations import transformers
from onchip.torch import TopK

h, w, y = torch.ones(4, 8), torch.ones(20, 8), torch.arange(4)
z = h @ w.T
hj, wj, yj = jnp.ones((4, 8)), jnp.ones((20, 8)), jnp.arange(4)
zj = hj @ wj.T
head = torch.nn.Linear(8, 20)

# Words that aren't options.
onchip.torch.linear_cross_entropy(h, w, y, reduction="avg")  # rejected
onchip.torch.linear_cross_entropy(h, w, y, backend="cuda")  # rejected
onchip.torch.linear_cross_entropy(h, w, y, strategy="fast")  # rejected
onchip.torch.linear_cross_entropy(h, w, y, precision="fp16")  # rejected
onchip.torch.cross_entropy(z, y, reduction="avg")  # rejected
onchip.torch.cross_entropy(z, y, backend="xla")  # rejected
onchip.torch.linear_jsd(h, w, h, w, reduction="batchmean")  # rejected
onchip.torch.jsd(z, z, backend="cuda")  # rejected
onchip.torch.linear_log_probs(h, w, y, backend="cuda")  # rejected
onchip.torch.log_probs(z, y, backend="cuda")  # rejected
onchip.torch.all_gather_matmul(h, w, None, precision="fp4")  # rejected
onchip.torch.fp8_linear(h, w, grad_dtype="e4m4")  # rejected
onchip.torch.fp8_linear(h, w, scale="bfloat16")  # rejected
onchip.torch.fp8_linear(h, w, backend="torch")  # rejected
onchip.torch.LinearCrossEntropyLoss(reduction="avg")  # rejected
onchip.torch.CrossEntropyLoss(backend="cuda")  # rejected
onchip.torch.LMHead(8, 20, strategy="fast")  # rejected
onchip.torch.LMHead.from_linear(head, reduction="avg")  # rejected
onchip.torch.lm_loss(head, h, y, reduction="avg")  # rejected
onchip.torch.lm_log_probs(head, h, y, backend="cuda")  # rejected
onchip.torch.lm_jsd(head, h, head, h, reduction="avg")  # rejected
onchip.torch.Fp8Linear(8, 20, scale="bfloat16")  # rejected
onchip.torch.MoE(8, 20, 4, 2, scoring="tanh")  # rejected
onchip.torch.MoE(8, 20, 4, 2, backend="xla")  # rejected
onchip.torch.all_gather_matmul(h, w, None, backend="nccl")  # rejected
onchip.torch.matmul_reduce_scatter(h, w, "tp")  # rejected
onchip.torch.RowParallelLinear(8, 20, None, backend="nccl")  # rejected
transformers.patch(head, precision="fp16")  # rejected
TopK(y, z, "odds", "truncated")  # rejected
TopK(y, z, "probs", "rest")  # rejected
onchip.jax.linear_cross_entropy(hj, wj, yj, reduction="avg")  # rejected
onchip.jax.linear_cross_entropy(hj, wj, yj, weight_layout="nt")  # rejected
onchip.jax.linear_cross_entropy(hj, wj, yj, backend="torch")  # rejected
onchip.jax.cross_entropy(zj, yj, backend="cuda")  # rejected
onchip.jax.sharded_linear_cross_entropy(hj, wj, yj)  # rejected
onchip.jax.sharded_linear_log_probs(hj, wj, yj, vocab_axis="model", token_axes=["data"])  # rejected
onchip.jax.linear_jsd(hj, wj, hj, wj, reduction="avg")  # rejected
onchip.jax.jsd(zj, zj, backend="cuda")  # rejected
onchip.jax.linear_log_probs(hj, wj, yj, weight_layout="nt")  # rejected
onchip.jax.log_probs(zj, yj, backend="cuda")  # rejected
onchip.jax.fp8_linear(hj, wj, weight_layout="vh")  # rejected

# Types.
onchip.torch.linear_cross_entropy(h, w, y, scratch_bytes=[1])  # rejected
onchip.torch.linear_cross_entropy(h, head, y)  # rejected
onchip.torch.linear_cross_entropy(h, w, y, softcap="30")  # rejected
onchip.torch.linear_cross_entropy(h, w, yj)  # rejected
onchip.torch.linear_cross_entropy(h, w, TopK(yj, zj, "probs", "truncated"))  # rejected
onchip.torch.linear_cross_entropy(h, w, y, smoothing=0.1)  # rejected
onchip.torch.linear_cross_entropy(h, w, labels=[1, 2])  # rejected
onchip.torch.LinearCrossEntropyLoss()(h, head, y)  # rejected
onchip.torch.CrossEntropyLoss()(z, y, reduction="sum")  # rejected
onchip.torch.LMHead(8, 20, smoothing=0.1)  # rejected
onchip.torch.LMHead(8, 20)(h, reduction="sum")  # rejected
onchip.torch.cross_entropy(z, y.tolist())  # rejected
onchip.torch.linear_log_probs(h, w, y, entropy="yes")  # rejected
onchip.torch.lm_log_probs(w, h, y)  # rejected
onchip.torch.lm_log_probs(head, h, y, z_loss=0.1)  # rejected
onchip.torch.lm_jsd(head, h, head, h, softcap=30.0)  # rejected
onchip.jax.linear_cross_entropy(hj, wj, yj, scratch_bytes=[1])  # rejected
onchip.jax.linear_cross_entropy(h, w, y)  # rejected
onchip.jax.linear_cross_entropy(hj, wj, [1, 2])  # rejected
onchip.jax.cross_entropy(zj, yj, temperature="1")  # rejected
onchip.jax.linear_log_probs(hj, wj, yj, top1="yes")  # rejected

# Results.
onchip.torch.linear_cross_entropy(h, w, y, return_stats=True).backward()  # rejected
onchip.torch.cross_entropy(z, y).lse.mean()  # rejected
onchip.torch.cross_entropy(z, y, return_stats=True)[1].loss.mean()  # rejected
onchip.torch.LinearCrossEntropyLoss(return_stats=True)(h, w, y).backward()  # rejected
onchip.torch.LMHead(8, 20)(h, y, return_stats=True).backward()  # rejected
onchip.torch.LMHead(8, 20, return_stats=True)(h, y).backward()  # rejected
onchip.torch.lm_loss(head, h, y, return_stats=True).backward()  # rejected
onchip.torch.linear_log_probs(h, w, y).entropy.mean()  # rejected
onchip.torch.lm_log_probs(head, h, y).entropy.mean()  # rejected
onchip.torch.lm_log_probs(head, h, y, entropy=True).mean()  # rejected
onchip.torch.log_probs(z, y, entropy=True).mean()  # rejected
onchip.jax.linear_cross_entropy(hj, wj, yj, return_stats=True).astype(np.float32)  # rejected
onchip.jax.linear_cross_entropy(hj, wj, yj, return_stats=True)[1].lse.numpy()  # rejected
onchip.jax.log_probs(zj, yj, lse=True).sum()  # rejected
