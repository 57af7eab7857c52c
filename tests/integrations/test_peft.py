"""Patched models of transformers under PEFT: the loss and the adapters' gradients of the unpatched model."""

import warnings

import pytest
import torch
import transformers

from onchip.integrations.transformers import patch, unpatch

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
WAYS = {
    "body": {"target_modules": ["q_proj", "v_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head and dropout": {"target_modules": ["lm_head"], "lora_dropout": 0.5},
    "rank-stabilized": {"target_modules": ["lm_head"], "use_rslora": True, "lora_alpha": 32},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trainable tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 7, 11]}},
    "trainable tokens, tied": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 7, 11]},
                               "tied": True},
}  # fmt: skip


def peft():
    """Imported where it is used: each worker of the tests imports this file."""
    import peft

    return peft


def model(config, tied=False):
    """One whose adapters are no longer zeros."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, tie_word_embeddings=tied))
    made = peft().get_peft_model(base, peft().LoraConfig(r=4, **config))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name or "delta" in name:
                p.normal_(std=0.1)
    return made.train()


def step(peft_model):
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    peft_model.zero_grad()
    torch.manual_seed(3)
    made = peft_model(input_ids=ids, labels=ids)
    made.loss.backward()
    grads = {name: p.grad.clone() for name, p in peft_model.named_parameters() if p.requires_grad}
    return made.loss.detach(), grads


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    assert len(expected[1]) > 0
    for name, g in expected[1].items():
        torch.testing.assert_close(found[1][name], g, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", WAYS)
def test_adapters(name):
    config = dict(WAYS[name])
    made = model(config, config.pop("tied", False))
    expected = step(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = patch(made)
        assert_same(step(made), expected)
    assert (report.fused, report.losses, report.materialized) == (True, 1, {})
    unpatch(made)
    assert_same(step(made), expected)


def test_patched_before_the_adapters_come():
    expected = step(model(WAYS["head"]))
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    report = patch(base)
    made = peft().get_peft_model(base, peft().LoraConfig(r=4, **WAYS["head"]))
    made.load_state_dict(model(WAYS["head"]).state_dict())
    assert_same(step(made), expected)
    assert (report.losses, report.materialized) == (1, {})


def test_disabled_and_several_adapters():
    made = model(WAYS["head"])
    made.add_adapter("other", peft().LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    made.base_model.set_adapter(["default", "other"])
    expected = step(made)
    ids = torch.arange(3, 9)[None]
    with made.disable_adapter(), torch.no_grad():
        plain = made(input_ids=ids, labels=ids).loss
    report = patch(made)
    assert_same(step(made), expected)
    with made.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(
            made(input_ids=torch.arange(3, 9)[None], labels=torch.arange(3, 9)[None]).loss, plain
        )
    assert (report.losses, report.materialized) == (2, {})


def test_a_head_of_another_kind_is_left_as_it_is():
    made = model({"target_modules": ["lm_head"], "use_dora": True})
    expected = step(made)
    with pytest.warns(UserWarning, match="not patched: the head .* not plain LoRA: DoraLinearVariant"):
        report = patch(made)
    assert not report.fused
    assert_same(step(made), expected)
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    report = patch(base)
    later = peft().get_peft_model(base, peft().LoraConfig(r=4, target_modules=["lm_head"], use_dora=True))
    with pytest.warns(UserWarning, match="not fused any more: the head .* has an adapter that is not plain LoRA"):
        step(later)
    assert not report.fused


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "VeraConfig"])
def test_adapters_that_are_no_lora(kind):
    """Some of PEFT's layers for them are called Linear too."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    options = {"feedforward_modules": []} if kind == "IA3Config" else {}
    made = peft().get_peft_model(base, getattr(peft(), kind)(target_modules=["lm_head"], **options))
    expected = step(made)
    with pytest.warns(UserWarning, match="not patched: the head .* is PEFT's peft.tuners.*, not plain LoRA"):
        report = patch(made)
    assert not report.fused
    assert_same(step(made), expected)
