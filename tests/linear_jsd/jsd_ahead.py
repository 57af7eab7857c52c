"""Compiles linear_jsd's Triton kernels for a GPU that isn't there, as the ops would launch them on it."""

from unittest import mock

import torch

from linear_cross_entropy.ahead_of_time import recording
from onchip.ops.linear_jsd import triton_launches as jsd_launches
from onchip.ops.linear_jsd import triton_memory as jsd_spec
from onchip.ops.linear_jsd import triton_product
from onchip.torch import TopK, jsd, linear_jsd

KERNELS = (jsd_launches.kernels, jsd_launches.topk_kernels, triton_product)


def launches(
    device,
    *,
    plan=None,
    hidden=512,
    teacher_hidden=1024,
    dtype=torch.bfloat16,
    parameters=None,
    tokens=300,
    vocab=1000,
    bias=False,
    logits=False,
    teacher_logits=False,
    topk="",
    weights=None,
    **options,
):
    """What the op launches, forward and backward, on a device: (compute capability, shared memory per block)."""

    def leaf(*shape):
        return torch.zeros(shape, dtype=parameters or dtype, requires_grad=True)

    planned = mock.patch.object(jsd_spec, "plan", side_effect=jsd_spec.plan if plan is None else lambda *_: plan)
    with recording(device) as found, planned, torch.autocast("cpu", dtype, enabled=parameters is not None):
        if options.get("hard_weight"):
            options["target"] = torch.zeros(tokens, dtype=torch.int64)
        if topk:
            ids = torch.arange(20).repeat(tokens, 1)
            options["teacher_topk"] = TopK(ids, torch.full((tokens, 20), -4.0), "log_probs", topk)
        if logits:
            teacher = () if topk else (leaf(tokens, vocab),)
            loss = jsd(leaf(tokens, vocab), *teacher, backend="triton", **options)
        else:
            w, v = weights or (leaf(vocab, hidden), leaf(vocab, teacher_hidden))
            pair = (None, None) if teacher_logits or topk else (leaf(tokens, teacher_hidden), v)
            loss = linear_jsd(
                leaf(tokens, hidden),
                w,
                *pair,
                student_bias=leaf(vocab) if bias else None,
                teacher_bias=leaf(vocab) if bias and pair[0] is not None else None,
                teacher_logits=leaf(tokens, vocab).detach() if teacher_logits else None,
                backend="triton",
                **options,
            )
        if loss.requires_grad:
            loss.sum().backward()
    return found
