"""Patched models of transformers under PEFT have the loss and the adapters' gradients of the unpatched model."""

import pytest
import torch

from integrations.tiny import assert_close, assert_unchanged, batch, llama, step
from onchip.integrations.transformers import patch
from onchip.torch import (
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    lm_jsd,
    lm_log_probs,
    lm_loss,
    log_probs,
)

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
    made = peft().get_peft_model(llama(tie_word_embeddings=tied), peft().LoraConfig(r=4, **config))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name or "delta" in name:
                p.normal_(std=0.1)
    return made.train()


@pytest.mark.parametrize("name", WAYS)
def test_adapters(name):
    config = dict(WAYS[name])
    assert_unchanged(model(config, config.pop("tied", False)))


@pytest.mark.parametrize("name", ["trainable tokens", "trainable tokens, tied"])
def test_losses_of_trainable_tokens(name):
    """`lm_*` refuses them, and what the message names computes the loss."""
    config = dict(WAYS[name])
    made, labels = model(config, config.pop("tied", False)), batch()["input_ids"]
    hidden = made(input_ids=labels, output_hidden_states=True).hidden_states[-1].detach()
    head = made.get_output_embeddings()
    for given in (made, head):
        with pytest.raises(TypeError, match=r"call linear_cross_entropy\(hidden, head\.weight, labels, "):
            lm_loss(given, hidden, labels)
        with pytest.raises(TypeError, match=r"call linear_log_probs\(hidden, head\.weight, ids, "):
            lm_log_probs(given, hidden, labels)
        with pytest.raises(TypeError, match=r"call linear_jsd with head\.weight and "):
            lm_jsd(given, hidden, head.original_module, hidden, labels=labels)
    loss = linear_cross_entropy(hidden, head.weight, labels, head.original_module.bias, shift=True)
    torch.testing.assert_close(loss, cross_entropy(made.get_base_model().lm_head(hidden), labels, shift=True))
    loss.backward()
    assert any("delta" in name and p.grad.any() for name, p in made.named_parameters() if p.grad is not None)
    log_prob = linear_log_probs(hidden, head.weight, labels, head.original_module.bias, shift=True)
    torch.testing.assert_close(log_prob[:, :-1], log_probs(head(hidden)[:, :-1], labels[:, 1:]))


def of_base_merged(made):
    made.merge_adapter()
    with made.disable_adapter():
        return made(**batch()).loss


def test_merged_adapters_that_are_disabled():
    made = model({"target_modules": ["lm_head"]})
    with torch.no_grad():
        expected = of_base_merged(made)
        report = patch(made)
        torch.testing.assert_close(of_base_merged(made), expected)
    assert report.losses == 1


def test_patched_before_the_adapters_come():
    expected = step(model(WAYS["head"]))
    base = llama()
    report = patch(base)
    made = peft().get_peft_model(base, peft().LoraConfig(r=4, **WAYS["head"]))
    made.load_state_dict(model(WAYS["head"]).state_dict())
    assert_close(step(made), expected)
    assert (report.losses, report.materialized) == (1, {})


def test_disabled_and_several_adapters():
    made = model(WAYS["head"])
    made.add_adapter("other", peft().LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    made.base_model.set_adapter(["default", "other"])
    expected = step(made)
    with made.disable_adapter(), torch.no_grad():
        plain = made(**batch()).loss
    report = patch(made)
    assert_close(step(made), expected)
    with made.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(made(**batch()).loss, plain)
    assert (report.losses, report.materialized) == (2, {})


def test_a_head_of_another_kind_is_left_as_it_is():
    made = model({"target_modules": ["lm_head"], "use_dora": True})
    expected = step(made)
    with pytest.warns(UserWarning, match="not patched: the head .* not plain LoRA: DoraLinearVariant"):
        report = patch(made)
    assert not report.fused
    assert_close(step(made), expected)
    base = llama()
    report = patch(base)
    later = peft().get_peft_model(base, peft().LoraConfig(r=4, target_modules=["lm_head"], use_dora=True))
    with pytest.warns(UserWarning, match="not fused any more: the head .* has an adapter that is not plain LoRA"):
        step(later)
    assert not report.fused


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "VeraConfig"])
def test_adapters_that_are_no_lora(kind):
    """Some of PEFT's layers for them are called Linear too."""
    base = llama()
    options = {"feedforward_modules": []} if kind == "IA3Config" else {}
    made = peft().get_peft_model(base, getattr(peft(), kind)(target_modules=["lm_head"], **options))
    expected = step(made)
    with pytest.warns(UserWarning, match="not patched: the head .* is PEFT's peft.tuners.*, not plain LoRA"):
        report = patch(made)
    assert not report.fused
    assert_close(step(made), expected)
