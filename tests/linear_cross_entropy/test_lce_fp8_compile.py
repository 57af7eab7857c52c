"""The kernel of precision='fp8' compiles for Hopper, fits its shared memory and spills nothing.  No GPU is needed."""

from unittest import mock

import pytest
import torch

from linear_cross_entropy.ahead_of_time import compile_all
from onchip.fp8.torch_quantize import TorchQuantized, empty
from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_cross_entropy import LinearCrossEntropyOptions
from onchip.vocab.fp8 import launches as fp8_launches
from onchip.vocab.fp8.torch import LogitsCall, LogitsGradient
from onchip.vocab.torch.loss import LossOutputs

HOPPER, SHARED = 90, 232448
LIKE = torch.zeros(1)
CLASSES = {"class_weight": 4096, "label_smoothing": 0.1}
ALL = {"token_weight": True, "temperature": True, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 15.0}


def make_call(tokens, **options):
    def per_token(name):
        return torch.ones(tokens) if options.get(name) else None

    numbers = {name: options[name] for name in ("label_smoothing", "z_loss", "softcap") if name in options}
    target = torch.zeros(tokens, dtype=torch.int64)
    classes = torch.ones(options["class_weight"]) if "class_weight" in options else None
    per_token = per_token("token_weight"), per_token("temperature")
    target, labels = options.get("target", target), options.get("labels")
    kind = "ids" if labels is None else "probs" if target.ndim == 2 else "dense"
    return LogitsCall(
        target, *per_token, labels, kind, torch.ones(()), classes, LinearCrossEntropyOptions(**numbers), of_shard=False
    )


def compiled(vocab=4096, rows=True, sums=False, soft=None, **options):
    tokens, of_labels = 512, {}
    if soft == "ids":
        ids = torch.zeros(tokens, 20, dtype=torch.int64)
        of_labels = fp8_launches.ids_in_blocks(ids, torch.zeros(tokens, 20), vocab)
        options |= {"target": ids, "labels": torch.ones(tokens, 20)}
    elif soft == "dense":
        labels = torch.ones(tokens, vocab, dtype=torch.bfloat16)
        of_labels = {"labels": labels, "labels_stride": vocab, "entries_stride": 1, "label_smoothing": 0.1}
        options |= {"labels": labels}
    else:
        of_labels = {"target": torch.zeros(tokens, dtype=torch.int64)}
    call, kept = make_call(tokens, **options), empty(vocab, 2 * tokens, "e4m3", LIKE)
    into = LogitsGradient(
        empty(tokens, vocab, "e4m3", LIKE) if rows else None,
        TorchQuantized(kept.data[:, tokens:], kept.scales[tokens // 128 :]),
        torch.empty(tokens // 128, vocab) if sums else None,
    )
    logits = torch.empty(tokens, vocab, dtype=torch.bfloat16)
    launch = fp8_launches.gradient_launch(call, logits, torch.empty(6, tokens), into, **of_labels)
    (found,) = compile_all([launch], HOPPER)
    assert found.shared <= SHARED
    assert "cvt.rn.satfinite.e4m3x2.f32" in found.ptx
    return found


QUICK = (ALL | {"soft": "ids"}, ALL | CLASSES | {"soft": "dense"}, {"sums": True})
MORE = ({}, ALL, CLASSES, {"rows": False}, {"vocab": 4100}, {"soft": "ids"}, {"soft": "dense"})


@pytest.mark.parametrize("options", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE)], ids=str)
def test_it_fits(options):
    found = compiled(**options)
    # With softcap tanh's polynomial and its exponential form are there at once, in 128 registers.
    assert found.spilled <= (72 if {"softcap", "class_weight"} & options.keys() else 32)
    assert 2 * found.shared <= SHARED


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), ALL, CLASSES | {"class_weight": 128256}], ids=str
)
def test_the_statistics_and_the_targets_logits(options):
    hidden, weight = (torch.empty(n, 512, dtype=torch.bfloat16) for n in (256, 128256))
    logits = torch.empty(256, 128256, dtype=torch.bfloat16)  # never touched, so it costs nothing
    call, found = make_call(256, **options), []
    softmax = LossOutputs(*(torch.empty(256) for _ in range(3)), None, None, None)
    with mock.patch.object(Launch, "run", lambda launch: found.append(launch)):
        targets = fp8_launches.target_logits(hidden, weight, weight[:, 0].contiguous(), call.ids)
        fp8_launches.softmax_of_chunk(
            call, logits, targets, softmax, LogitsGradient(None, None, torch.empty(2, 128256))
        )
    made = {k.kernel: k for k in compile_all(found, HOPPER)}
    assert made.pop("softmax_gradient")
    assert set(made) == {"target_logits", "losses"}
    assert made["losses"].constants["target_logit"]
    for k in made.values():
        assert k.spilled <= (112 if k.kernel == "losses" and "class_weight" in options else 32), (k.kernel, k.stack)
        assert "v4.b32" in k.ptx
