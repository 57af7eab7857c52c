"""The mixture-of-experts layer of PyTorch, against a loop over its experts in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from onchip.ops.grouped_matmul.torch_moe import group
from onchip.torch import MoE

H, INNER, E, T = 12, 8, 6, 30
LAYERS = {
    "Mixtral": {"top_k": 2},
    "Switch": {"top_k": 1, "norm_topk": False},
    "DeepSeek-V3": {"top_k": 3, "scoring": "sigmoid", "scaling_factor": 2.5, "num_shared": 1},
    "biases": {"top_k": 2, "bias": True, "num_shared": 2},
    "groups and a correction": {
        "top_k": 3, "scoring": "sigmoid", "scaling_factor": 2.5, "correction_bias": True, "n_group": 3, "topk_group": 2,
    },
    "all experts": {"top_k": E, "norm_topk": False, "scoring": "sigmoid"},
}  # fmt: skip
DOUBLE = {"dtype": torch.float64}


def layer(dtype=None, top_k=2, **options):
    return MoE(H, INNER, E, top_k, dtype=dtype, **options)


def chosen_by(moe, scores):
    """[E] bool: the experts of a token with these scores [E]."""
    if moe.e_score_correction_bias is not None:
        scores = scores + moe.e_score_correction_bias
    size = E // moe.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(moe.n_group)]
    groups.sort(key=lambda group: -sum(sorted(scores[e].item() for e in group)[-2:]))
    allowed = [e for group in groups[: moe.topk_group] for e in group]
    best = sorted(allowed, key=lambda e: -scores[e].item())[: moe.top_k]
    return torch.tensor([e in best for e in range(E)])


def looped(moe, x):
    """Every expert for every token, with weights of 0 for those that aren't its own: y, and the five statistics."""
    x = x.reshape(-1, H)
    logits = F.linear(x, moe.router.weight, moe.router.bias)
    scores = logits.softmax(1) if moe.scoring == "softmax" else logits.sigmoid()
    chosen = torch.stack([chosen_by(moe, s) for s in scores.detach()])
    weights = scores * chosen * moe.scaling_factor
    weights = weights / (scores * chosen).sum(1, keepdim=True) if moe.norm_topk else weights

    def swiglu(y):
        gate, up = y.chunk(2, 1)
        return gate / (1 + torch.exp(-gate)) * up

    y = torch.zeros_like(x)
    for e in range(E):
        gate_up_bias, down_bias = (None if b is None else b[e] for b in (moe.gate_up_bias, moe.down_bias))
        expert = F.linear(swiglu(F.linear(x, moe.gate_up[e], gate_up_bias)), moe.down[e], down_bias)
        y = y + weights[:, e, None] * expert
    if moe.num_shared:
        y = y + moe.shared_down(swiglu(moe.shared_gate_up(x)))
    fraction = chosen.sum(0).to(x.dtype) / chosen.sum()
    mean_prob = (scores / scores.sum(1, keepdim=True)).mean(0)
    aux_loss, z_loss = E * (fraction * mean_prob).sum(), logits.exp().sum(1).log().square().mean()
    return y, (chosen.sum(0).int(), fraction, mean_prob, aux_loss, z_loss)


def gradients(moe, x, run):
    x = x.detach().requires_grad_()
    y, stats = run(x)
    made = {"y": y.reshape(-1, H), **dict(zip(("counts", "fraction", "mean_prob", "aux", "z"), stats, strict=True))}
    loss = (y.reshape(-1, H) * torch.arange(1.0, 1 + H).to(y.dtype)).square().mean() + 0.1 * stats[3] + 0.01 * stats[4]
    moe.zero_grad()
    loss.backward()
    return made | {"x": x.grad} | {name: p.grad.clone() for name, p in moe.named_parameters()}


@pytest.mark.parametrize("name", LAYERS)
def test_a_loop_over_experts(name):
    moe = layer(**DOUBLE, **LAYERS[name])
    x = torch.randn(2, T // 2, H, **DOUBLE)
    if moe.e_score_correction_bias is not None:
        moe.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, E))
    made = gradients(moe, x, lambda x: moe(x, return_stats=True))
    expected = gradients(moe, x, lambda x: looped(moe, x))
    assert made["counts"].sum() == T * moe.top_k
    torch.testing.assert_close(made, expected, check_dtype=False, rtol=1e-12, atol=1e-12)
    assert made["counts"].dtype == torch.int32


def test_a_correction_bias_balances_the_experts():
    """From a router that sends all tokens to the same ones.  It has no gradient, and is saved with the layer."""
    moe = layer(top_k=2, bias=True, scoring="sigmoid", correction_bias=True)
    torch.nn.init.constant_(moe.router.weight, 0)
    with torch.no_grad():
        moe.router.weight[:, 0] = 0.1
        moe.router.bias.copy_(torch.linspace(-1, 1, E))
    x, counts = torch.randn(64, H), []
    for _ in range(200):
        y, stats = moe(x, return_stats=True)
        counts.append(stats.counts)
        before = moe.e_score_correction_bias.clone()
        moe.update_correction_bias(stats.counts, rate=0.01)
        steps = torch.sign(stats.counts.float().mean() - stats.counts) * 0.01
        torch.testing.assert_close(moe.e_score_correction_bias, before + steps)
    assert counts[0].tolist() == [0] * (E - 2) + [64, 64]
    assert torch.stack(counts[-60:]).float().mean(0).sub(128 / E).abs().max() < 0.5 * 128 / E
    y.sum().backward()
    assert moe.router.weight.grad.abs().sum() > 0
    assert not moe.e_score_correction_bias.requires_grad
    twin = layer(top_k=2, bias=True, scoring="sigmoid", correction_bias=True)
    twin.load_state_dict(moe.state_dict())
    assert torch.equal(twin(x), moe(x))


def test_the_statistics_change_nothing():
    moe, x = layer(num_shared=1), torch.randn(3, 5, H)
    y, stats = moe(x, return_stats=True)
    assert torch.equal(moe(x), y)
    assert y.shape == x.shape
    assert not stats.counts.requires_grad
    assert not stats.fraction.requires_grad


def test_an_even_spread_has_loss_one():
    moe = layer(top_k=2, **DOUBLE)
    torch.nn.init.zeros_(moe.router.weight)
    stats = moe(torch.randn(T, H, **DOUBLE), return_stats=True)[1]
    torch.testing.assert_close(stats.aux_loss, torch.ones((), **DOUBLE))
    assert stats.counts.max() == T  # ties all go the same way


def test_a_token_alone():
    """A token's result depends on no other token; NaN stays where it is."""
    moe, x = layer(top_k=2), torch.randn(T, H)
    y = moe(x)
    torch.testing.assert_close(moe(x[7]), y[7])
    x[3] = float("nan")
    wrong = moe(x)
    assert wrong[3].isnan().all()
    torch.testing.assert_close(wrong[4:], y[4:])


def test_no_tokens():
    moe = layer(num_shared=1, bias=True, correction_bias=True, n_group=3, topk_group=2)
    x = torch.zeros(0, H, requires_grad=True)
    y, stats = moe(x, return_stats=True)
    (y.sum() + stats.aux_loss + stats.z_loss).backward()
    moe.update_correction_bias(stats.counts)
    assert not moe.e_score_correction_bias.any()
    assert y.shape == (0, H)
    assert not any(value.any() for value in (*stats, *(p.grad for p in moe.parameters())))


def test_scores_that_are_all_zero():
    """Sigmoids underflow where softmax has 1 / E; what is 0 / 0 else, is 0."""
    moe = layer(scoring="sigmoid", bias=True)
    torch.nn.init.constant_(moe.router.bias, -200.0)
    y, stats = moe(torch.randn(T, H), return_stats=True)
    assert not y.any()
    assert stats.aux_loss == 0


def test_choices_of_no_expert_come_last():
    experts = torch.tensor([[2, 3], [-1, 0], [7, 2], [0, 1]])
    order, rows, ends = group(experts, 3)
    assert ends.tolist() == [2, 3, 5]
    assert order.tolist() == [3, 6, 7, 0, 5, 1, 2, 4]
    assert rows.tolist() == [1, 3, 3, 0, 2, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    moe = layer(dtype, num_shared=1, bias=True)
    assert (moe.router.weight.dtype, moe.router.bias.dtype, moe.gate_up.dtype) == (torch.float32, torch.float32, dtype)
    x = torch.randn(T, H, dtype=dtype)
    y, stats = moe(x, return_stats=True)
    assert (y.dtype, stats.mean_prob.dtype) == (dtype, torch.float32)
    expected, _ = looped(copy.deepcopy(moe).double(), x.double())
    assert (y - expected).norm() < 0.02 * expected.norm()
    # A router that was cast with the model still computes in float32.
    again = moe.to(dtype)(x, return_stats=True)[1]
    assert again.z_loss.dtype == torch.float32


def test_autocast():
    moe, x = layer(num_shared=1), torch.randn(T, H, requires_grad=True)
    expected, stats = moe(x, return_stats=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, under = moe(x, return_stats=True)
    assert y.dtype == torch.bfloat16
    assert torch.equal(under.mean_prob, stats.mean_prob)  # the router's are no 16 bits
    assert 0 < (y - expected).norm() < 0.02 * expected.norm()
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in (x, *moe.parameters()))


def test_checkpointing():
    moe, x = layer(num_shared=1, **DOUBLE), torch.randn(T, H, **DOUBLE)
    plain = gradients(moe, x, lambda x: moe(x, return_stats=True))
    recomputed = gradients(moe, x, lambda x: checkpoint(lambda x: moe(x, return_stats=True), x, use_reentrant=False))
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_compiled():
    """Whole, and once for all numbers of tokens."""
    moe = layer(num_shared=1, bias=True, scoring="sigmoid", correction_bias=True, n_group=3, topk_group=2, **DOUBLE)
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(moe, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (T, 17, 8):
        x = torch.randn(tokens, H, **DOUBLE)
        made = gradients(moe, x, lambda x: compiled(x, return_stats=True))
        expected = gradients(moe, x, lambda x: moe(x, return_stats=True))
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    assert len(seen) == 1


def test_parameters():
    moe = layer(num_shared=2, bias=True)
    assert {name: list(p.shape) for name, p in moe.named_parameters()} == {
        "gate_up": [E, 2 * INNER, H],
        "down": [E, H, INNER],
        "gate_up_bias": [E, 2 * INNER],
        "down_bias": [E, H],
        "router.weight": [E, H],
        "router.bias": [E],
        "shared_gate_up.weight": [4 * INNER, H],
        "shared_gate_up.bias": [4 * INNER],
        "shared_down.weight": [H, 2 * INNER],
        "shared_down.bias": [H],
    }
    for name, p in moe.named_parameters():
        inputs = {"down": INNER, "shared_down": 2 * INNER}.get(name.removesuffix("_bias").split(".")[0], H)
        assert 0.5 * inputs**-0.5 < p.abs().max() <= inputs**-0.5
    assert {*layer().state_dict()} == {"router.weight", "gate_up", "down"}
    twin = layer(num_shared=2, bias=True)
    twin.load_state_dict(moe.state_dict())
    x = torch.randn(3, H)
    assert torch.equal(twin(x), moe(x))
    assert torch.equal(copy.deepcopy(moe)(x), moe(x))
    options = {"norm_topk": False, "scoring": "sigmoid", "scaling_factor": 2.5, "backend": "plain"}
    assert layer(top_k=3, **options).extra_repr() == (
        f"{H}, {INNER}, num_experts={E}, top_k=3, norm_topk=False, scoring='sigmoid', scaling_factor=2.5, "
        "backend='plain'"
    )


@pytest.mark.gpu
def test_on_a_gpu_nothing_synchronises():
    options = {"correction_bias": True, "n_group": 3, "topk_group": 2}
    moe = layer(torch.bfloat16, num_shared=1, bias=True, device="cuda", **options)
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        y, stats = moe(x, return_stats=True)
        (y.float().square().mean() + 0.01 * stats.aux_loss).backward()
        moe.update_correction_bias(stats.counts)
        return y

    step()
    moe.e_score_correction_bias.zero_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    moe.e_score_correction_bias.zero_()
    expected, _ = looped(copy.deepcopy(moe).cpu().double(), x.detach().cpu().double())
    assert (y.cpu() - expected).norm() < 0.02 * expected.norm()
