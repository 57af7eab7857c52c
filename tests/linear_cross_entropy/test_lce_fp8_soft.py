"""precision='fp8' with soft labels, for K ids and for every entry: compared with the oracle, and across chunks, copies
of the weight and a GPU's kernels.
"""

from functools import partial

import numpy as np
import pytest
import torch
from lce_fp8_cases import GRADIENT_DB, LOSS_ERROR, assert_alike, of_every_kind, soft_problem, soft_results

from losses import LCE
from onchip.bench.torch_steps import peak_extra_bytes
from onchip.ops.fp8_linear.reference import snr_db
from onchip.torch import TopK, linear_cross_entropy, quantize_weight
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.memory import Problem
from shared import gradients
from soft_labels import oracle, right_stats

pytestmark = pytest.mark.usefixtures("unwritten_memory_shows")
FORMS = ("probs", "log_probs", "dense")
in_fp8 = partial(linear_cross_entropy, precision="fp8")


def assert_near(given, options, **how):
    """The loss, and the gradients, within what FP8 may cost."""
    made = soft_results(given, options, **how)
    right = oracle(LCE, given, torch.ones(()), **options)._asdict()
    assert abs(made["loss"] - right["loss"]) <= LOSS_ERROR * abs(right["loss"])
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        assert snr_db(made[name], right[name]) >= GRADIENT_DB, name
    for name, x in right_stats(LCE, given, **options).items():
        if name in made:
            x = x.detach().cpu().numpy()
            assert np.linalg.norm(made[name] - x) <= 0.01 * np.linalg.norm(x) + 0.03 * np.sqrt(x.size), name


@pytest.mark.parametrize("form", FORMS)
def test_values(form):
    given = soft_problem(form, 150, 128, 400)
    for options in ({}, of_every_kind(150, 400), {"label_smoothing": 1.0}, {"z_loss": 1e-2, "reduction": "sum"}):
        assert_near(given, options)


@pytest.mark.parametrize("form", ["probs", "dense"])
def test_chunks_and_a_quantised_weight_change_nothing(form, monkeypatch):
    """But the order in which a bias's gradient is summed; labels whose dimensions can't be flattened among them."""
    given = soft_problem(form, 300, 40, 200)
    given["hidden"] = given["hidden"].detach().view(2, 150, 40).requires_grad_()
    if form == "dense":
        given["target"] = given["target"].reshape(2, 150, 200).transpose(0, 1).contiguous().transpose(0, 1)
    else:
        given["target"] = TopK(*(x.view(2, 150, -1) for x in given["target"][:2]), *given["target"][2:])
    options = {"label_smoothing": 0.1, "softcap": 15.0}
    whole = soft_results(given, options)
    monkeypatch.setattr(fp8_memory, "DEFAULT_CHUNK", 128)
    assert_alike(soft_results(given, options), whole, 1e-5, 1e-5)
    leaves = given["hidden"], given["weight"]
    made = (in_fp8(**given | {"weight": x}, **options) for x in (given["weight"], quantize_weight(given["weight"])))
    a, b = ([loss, *gradients(loss, *leaves)] for loss in made)
    assert all(map(torch.equal, a, b))


def test_a_certain_label_is_nearly_that_of_its_id():
    """Whose logit is rounded to bfloat16 in a row of labels."""
    given = soft_problem("dense", 40, 64, 200)
    y = torch.arange(40)
    expected = in_fp8(**given | {"target": y}, reduction="sum")
    hidden = gradients(expected, given["hidden"])[0]
    made = in_fp8(**given | {"target": TopK(y[:, None], torch.ones(40, 1), "probs", "truncated")}, reduction="sum")
    assert abs(made - expected) <= 1e-3 * expected
    assert (gradients(made, given["hidden"])[0] - hidden).norm() <= 0.02 * hidden.norm()


@pytest.mark.parametrize("form", ["probs", "dense"])
def test_shift_token_losses_and_memory_of_the_callers(form):
    given = soft_problem(form, 24, 16, 70)
    given["hidden"] = given["hidden"].detach().view(2, 12, 16).requires_grad_()
    target = given["target"]
    shaped = (
        target.reshape(2, 12, 70) if form == "dense" else TopK(*(x.view(2, 12, -1) for x in target[:2]), *target[2:])
    )
    given |= {"target": shaped, "bias": given["bias"].detach()}
    each, stats = in_fp8(**given, shift=True, reduction="none", return_stats=True)
    assert not each[:, -1].any()
    assert stats.argmax[:, -1].tolist() == [-1, -1]
    loss = in_fp8(**given, shift=True)
    torch.testing.assert_close(each.sum() / 22, loss)
    a, b = (
        gradients(each, given["hidden"], given["weight"], grad=torch.full((2, 12), 1 / 22)),
        gradients(loss, given["hidden"], given["weight"]),
    )
    torch.testing.assert_close(a[0], b[0])
    assert (a[1] - b[1]).norm() <= 0.05 * b[1].norm()
    target = shaped[:, :0] if form == "dense" else TopK(*(x[:, :0] for x in shaped[:2]), *shaped[2:])
    nothing = in_fp8(**given | {"hidden": given["hidden"][:, :0], "target": target})
    assert nothing == 0
    nothing.backward()
    assert not given["weight"].grad.any()
    out = torch.zeros(70, 16)
    in_fp8(**given, shift=True, weight_grad_out=out).backward()
    torch.testing.assert_close(out, b[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["probs", "dense"])
def test_memory(form):
    tokens, hidden, vocab = 512, 64, 8192
    p = Problem(tokens, hidden, vocab, grad_bias=True, **({"labels": "float32"} if form == "dense" else {"ids": 6}))
    given = soft_problem(form, tokens, hidden, vocab)
    budget = fp8_memory.scratch_bytes(p, 256)

    def step():
        loss = in_fp8(**given, scratch_bytes=budget)
        return [loss.detach(), *gradients(loss, given["hidden"], given["weight"], given["bias"])]

    step()
    assert peak_extra_bytes(step, device="cpu") <= budget
    with pytest.raises(
        ValueError, match="scratch_bytes=1000 is too small for T=512, H=64, V=8192 with precision='fp8'"
    ):
        in_fp8(**given, scratch_bytes=1000)


# --------------------------------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_kernels(form, dtype, monkeypatch):
    """Against the oracle and PyTorch's operations, in chunks of 128 tokens, of sizes that are ragged or not."""
    monkeypatch.setattr(fp8_memory, "DEFAULT_CHUNK", 128)
    for vocab in (4096, 5003):
        given = soft_problem(form, 300, 256, vocab, ids=20, device="cuda", dtype=dtype)
        options = of_every_kind(300, vocab, "cuda") if (vocab == 5003) == (dtype == torch.bfloat16) else {}
        assert_near(given, options, backend="triton")
        made, right = (soft_results(given, options, backend=b) for b in ("triton", "plain"))
        assert_alike(made, right, 5e-3, 1.5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["probs", "dense"])
def test_repeated_calls_have_the_same_bits_and_fit_the_formula(form):
    tokens, hidden, vocab = 4096, 512, 32768
    labels = {"labels": "bfloat16"} if form == "dense" else {"ids": 64}
    p = Problem(tokens, hidden, vocab, "bfloat16", device="cuda", grad_bias=True, smoothing=0.1, **labels)
    given = soft_problem(form, tokens, hidden, vocab, ids=64, device="cuda", dtype=torch.bfloat16)
    if form == "dense":
        given["target"] = given["target"].contiguous()
    budget = fp8_memory.scratch_bytes(p, 1024)

    def step():
        loss = in_fp8(**given, label_smoothing=0.1, scratch_bytes=budget, backend="triton")
        return [loss.detach(), *gradients(loss, given["hidden"], given["weight"], given["bias"])]

    first = step()
    for _ in range(4):
        assert all(map(torch.equal, step(), first))
    assert peak_extra_bytes(step, device="cuda") <= budget + (40 << 20)  # cuBLAS has a workspace of its own
