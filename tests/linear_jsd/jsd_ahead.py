"""Compile linear_jsd's Triton kernels for a GPU that isn't there, as the ops would launch them on it."""

import importlib.util
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

from onchip.ops.linear_cross_entropy import triton_launches, triton_op, triton_spec
from onchip.ops.linear_jsd import triton_launches as jsd_launches
from onchip.ops.linear_jsd import triton_spec as jsd_spec
from onchip.torch import jsd, linear_jsd

# The compiling itself is that of linear_cross_entropy's tests, whose folder isn't importable from here.
_PATH = Path(__file__).parents[1] / "linear_cross_entropy" / "ahead_of_time.py"
_SPEC = importlib.util.spec_from_file_location("ahead_of_time", _PATH)
_AHEAD = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_AHEAD)
compile_all = _AHEAD.compile_all
KERNELS = jsd_launches.kernels


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
    **options,
):
    """What the op launches, forward and backward, on a device: (compute capability, shared memory per block)."""
    capability, shared = device
    found = []
    make_run = triton_launches.Run

    def run(*arguments, tma, **more):
        return make_run(*arguments, tma=tma and capability >= 90, **more)

    def leaf(*shape):
        return torch.zeros(shape, dtype=parameters or dtype, requires_grad=True)

    with ExitStack() as stack:
        for patch in (
            mock.patch.object(triton_op, "refusal", return_value=None),
            mock.patch.object(triton_spec, "heuristic_tiles", return_value=triton_spec.heuristic_tiles(shared)),
            mock.patch.object(jsd_spec, "plan", side_effect=jsd_spec.plan if plan is None else lambda *_: plan),
            mock.patch.object(triton_launches, "Run", run),
            mock.patch.object(triton_launches.Launch, "run", lambda launch: found.append(launch)),
            torch.autocast("cpu", dtype, enabled=parameters is not None),
        ):
            stack.enter_context(patch)
        if options.get("hard_weight"):
            options["target"] = torch.zeros(tokens, dtype=torch.int64)
        if logits:
            loss = jsd(leaf(tokens, vocab), leaf(tokens, vocab), backend="triton", **options)
        else:
            pair = (None, None) if teacher_logits else (leaf(tokens, teacher_hidden), leaf(vocab, teacher_hidden))
            loss = linear_jsd(
                leaf(tokens, hidden),
                leaf(vocab, hidden),
                *pair,
                student_bias=leaf(vocab) if bias else None,
                teacher_bias=leaf(vocab) if bias and not teacher_logits else None,
                teacher_logits=leaf(tokens, vocab).detach() if teacher_logits else None,
                backend="triton",
                **options,
            )
        if loss.requires_grad:
            loss.sum().backward()
    return found
