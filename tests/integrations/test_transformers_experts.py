"""transformers' mixture-of-experts models, with their experts by grouped_matmul, have their own losses and
gradients.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from integrations.transformers_models import TINY, build, step
from onchip.integrations import transformers_experts
from onchip.integrations.transformers import register_experts
from onchip.torch import MoE

# Two with SwiGLU; a sigmoid's scores and shared experts; biases, [E, K, N] weights, interleaved and clamped.
MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture(autouse=True)
def registered():
    register_experts()
    yield
    transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS._global_mapping.pop("onchip")


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of each call of `moe_forward`."""
    seen, run = [], transformers_experts.moe_forward

    def counted(*args, **named):
        seen.append(named)
        return run(*args, **named)

    monkeypatch.setattr(transformers_experts, "moe_forward", counted)
    return seen


def error(made, expected):
    """The largest of the gradients', relative to its norm and a thousandth of that of all."""
    assert set(made) == set(expected)
    norm = sum(g.norm().square() for g in expected.values()).sqrt()
    return max(float((made[name] - g).norm() / (g.norm() + norm / 1000)) for name, g in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_models_own(name, calls):
    model, why = build(name)
    assert model is not None, why
    model.set_experts_implementation("eager")
    expected, grads = step(model)
    assert not calls
    model.set_experts_implementation("onchip")
    made, found = step(model)
    assert calls
    assert (calls[0]["activation"] is None) == (name != "gpt_oss")
    assert (calls[0]["weight_layout"] == "gkn") == (name == "gpt_oss")
    assert abs(made.loss - expected.loss) < 1e-5
    assert error(found, grads) < 1e-5


class Transposed(nn.Module):
    """Experts with weights [E, K, N], biases and plain SwiGLU."""

    def __init__(self, config):
        super().__init__()
        for name, shape in {"gate_up_proj": (4, 32, 48), "down_proj": (4, 24, 32)}.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))
            setattr(self, f"{name}_bias", nn.Parameter(torch.empty(4, shape[2])))
        self.num_experts, self.act_fn = 4, nn.SiLU()

    def forward(self, x, ids, weights):
        y = 0
        for e in range(4):
            inner = self._apply_gate(x @ self.gate_up_proj[e] + self.gate_up_proj_bias[e])
            y += (inner @ self.down_proj[e] + self.down_proj_bias[e]) * (weights * (ids == e)).sum(1, keepdim=True)
        return y


@pytest.mark.parametrize("kind", ["no gate", "transposed"])
def test_other_layouts(kind, calls):
    config = SimpleNamespace(
        n_routed_experts=4, hidden_size=32, moe_intermediate_size=16, moe_latent_size=None, mlp_hidden_act="relu2"
    )
    decorated = use_experts_implementation(Transposed, is_transposed=True, has_bias=True)
    experts = (NemotronHExperts if kind == "no gate" else decorated)(config).double()
    for p in experts.parameters():
        nn.init.normal_(p)
    x, weights = (torch.rand(11, n, dtype=torch.float64, requires_grad=True) for n in (32, 2))
    ids = torch.randint(4, (11, 2))
    ids[:, 1] = (ids[:, 0] + 1) % 4
    made = []
    for config._experts_implementation in ("eager", "onchip"):
        y = experts(x, ids, weights)
        made.append((y, *torch.autograd.grad(y.square().sum(), (x, weights, *experts.parameters()))))
    torch.testing.assert_close(*made)
    (named,) = calls
    assert (named["activation"] is None, named["weight_layout"]) == (
        (False, "gnk") if kind == "no gate" else (True, "gkn")
    )


def tiny(**more):
    sizes = {**TINY, "num_hidden_layers": 1, "num_local_experts": 4}
    return transformers.MixtralConfig(**sizes, **more)


def test_a_model_takes_it_by_name():
    model = transformers.AutoModelForCausalLM.from_config(tiny(), experts_implementation="onchip")
    assert model.config._experts_implementation == "onchip"
    assert model(torch.arange(3, 9)[None]).logits.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_auxiliary_loss_and_checkpointing():
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(tiny(output_router_logits=True, router_aux_loss_coef=0.5)).train()
    model.set_experts_implementation("eager")
    expected, grads = step(model)
    model.set_experts_implementation("onchip")
    model.gradient_checkpointing_enable()
    made, found = step(model)
    assert abs(made.aux_loss - expected.aux_loss) < 1e-5
    assert error(found, grads) < 1e-5


def test_bfloat16_and_autocast():
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(tiny())
    model.set_experts_implementation("onchip")
    expected = step(model)[0].loss
    with torch.autocast("cpu", torch.bfloat16):
        made, grads = step(model)
    assert abs(made.loss - expected) < 0.02
    assert all(g.dtype == torch.float32 for g in grads.values())
    made, grads = step(model.bfloat16())
    assert abs(made.loss - expected) < 0.02
    assert all(g.dtype == torch.bfloat16 for g in grads.values())


def test_compiled():
    torch.manual_seed(0)
    experts = transformers.MixtralForCausalLM(tiny()).model.layers[0].mlp.experts
    experts.config._experts_implementation = "onchip"
    x, weights = torch.randn(9, 32), torch.rand(9, 2)
    ids = torch.randint(4, (9, 2))
    compiled = torch.compile(experts, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, ids, weights), experts(x, ids, weights))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_ids_of_another_ranks_experts(name):
    """Two halves of the experts, each with num_experts for the id of what isn't its own, add up to the whole."""
    model, _ = build(name)
    experts = next(m for m in model.modules() if hasattr(m, "down_proj") and m.down_proj.ndim == 3)
    count = experts.num_experts
    x, ids = torch.randn(11, 32, requires_grad=True), torch.rand(11, count).topk(2).indices
    weights = torch.rand(11, 2, requires_grad=True)
    experts.config._experts_implementation = "eager"
    whole = experts(x, ids, weights)
    expected = torch.autograd.grad(whole.square().sum(), (x, weights, *experts.parameters()))
    experts.config._experts_implementation = "onchip"
    parts = []
    for start in (0, count // 2):
        part, own = build(name)[0], slice(start, start + count // 2)
        half = next(m for m in part.modules() if hasattr(m, "down_proj") and m.down_proj.ndim == 3)
        half.config._experts_implementation = "onchip"
        half.num_experts = count // 2
        half._is_expert_parallel = True
        for key in list(half._parameters):
            half._parameters[key] = experts._parameters[key][own]
        mine = (ids >= own.start) & (ids < own.stop)
        parts.append(half(x, (ids - start).where(mine, count // 2), weights * mine))
    y = parts[0] + parts[1]
    torch.testing.assert_close(y, whole)
    made = torch.autograd.grad(y.square().sum(), (x, weights, *experts.parameters()))
    torch.testing.assert_close(made, expected)


def test_a_norm_after_each_expert_is_refused():
    model = transformers.MixtralForCausalLM(tiny())
    model.set_experts_implementation("onchip")
    model.model.layers[0].mlp.experts.has_post_expert_norm = True
    with pytest.raises(NotImplementedError, match=r"MixtralExperts has a norm .* experts_implementation='grouped_mm'"):
        step(model)


def test_a_gate_of_the_instances_own_is_kept(calls):
    experts = transformers.MixtralForCausalLM(tiny()).model.layers[0].mlp.experts
    experts.config._experts_implementation = "onchip"
    given = torch.randn(3, 32), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    swiglu = experts(*given)
    experts._apply_gate = lambda y: y.chunk(2, -1)[0]
    assert not torch.allclose(experts(*given), swiglu)
    del experts._apply_gate
    experts.act_fn = nn.GELU()
    assert not torch.allclose(experts(*given), swiglu)
    experts.act_fn = nn.SiLU()
    assert torch.equal(experts(*given), swiglu)
    assert [named["activation"] is None for named in calls] == [True, False, False, True]


def test_without_transformers_5(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match="transformers"):
        register_experts()


@pytest.mark.parametrize(("n_group", "topk_group"), [(4, 2), (1, 1)])
def test_the_layer_of_deepseek_v3(n_group, topk_group):
    """With its router's correction bias and groups: the same experts, results and gradients."""
    config = DeepseekV3Config(
        hidden_size=12, moe_intermediate_size=8, n_routed_experts=16, num_experts_per_tok=3, n_group=n_group,
        topk_group=topk_group, n_shared_experts=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    theirs = DeepseekV3MoE(config)
    options = {"scoring": "sigmoid", "scaling_factor": 2.5, "correction_bias": True, "num_shared": 2}
    ours = MoE(12, 8, 16, 3, n_group=n_group, topk_group=topk_group, **options)
    theirs.gate.weight.data.normal_()
    theirs.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 16))
    for name in ("gate_up", "down"):
        getattr(theirs.experts, f"{name}_proj").data.copy_(getattr(ours, name).data)
    shared = theirs.shared_experts
    ours.load_state_dict({
        "router.weight": theirs.gate.weight, "e_score_correction_bias": theirs.gate.e_score_correction_bias,
        "gate_up": ours.gate_up, "down": ours.down, "shared_down.weight": shared.down_proj.weight,
        "shared_gate_up.weight": torch.cat([shared.gate_proj.weight, shared.up_proj.weight]),
    })  # fmt: skip
    x = torch.randn(2, 40, 12)
    y, stats = ours(x, return_stats=True)
    chosen = theirs.gate(x)[2]
    assert torch.equal(stats.counts, chosen.flatten().bincount(minlength=16).int())
    expected = theirs(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.router.weight.grad, theirs.gate.weight.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.down.grad, theirs.experts.down_proj.grad, rtol=1e-4, atol=1e-5)
