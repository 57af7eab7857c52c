"""The sizes of a model in `onchip plan`: by its name, and from its config."""

import json

import pytest

from onchip.plan import plan
from onchip.plan.models import MODELS, named_model
from shared import run_cli


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("LLAMA3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("gemma-3-4b-it", "google/gemma-3-4b"),
        ("gpt_oss 20b", "openai/gpt-oss-20b"),
        ("deepseek-v3-0324", "deepseek-ai/DeepSeek-V3"),
    ],
)
def test_a_model_by_its_name(name, found):
    assert named_model(name).name == found


def test_every_model_is_found_by_its_own_name():
    assert all(named_model(name) is model for name, model in MODELS.items())


CONFIGS = [
    (
        {"hidden_size": 64, "vocab_size": 1000, "final_logit_softcapping": 30.0, "tie_word_embeddings": True},
        64,
        1000,
        30,
    ),
    ({"n_embd": 64, "vocab_size": 1000, "model_type": "gpt2"}, 64, 1000, None),
    ({"d_model": 64, "vocab_size": 1000, "final_logit_softcapping": None}, 64, 1000, None),
    ({"model_type": "x", "vocab_size": 9, "text_config": {"hidden_size": 64, "vocab_size": 1000}}, 64, 1000, None),
    ({"thinker_config": {"text_config": {"hidden_size": 64, "vocab_size": 1000}}}, 64, 1000, None),
]


@pytest.mark.parametrize(("config", "hidden", "vocab", "softcap"), CONFIGS, ids=lambda x: str(x)[:40])
def test_a_config_of_any_causal_model(tmp_path, config, hidden, vocab, softcap):
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = plan(tokens=128, config=tmp_path)
    assert made.sizes == {"tokens": 128, "hidden": hidden, "vocab": vocab}
    said = " ".join(made.notes)
    assert (f"pass softcap={softcap}" in said) == ("shares its weight" in said) == (softcap is not None)


def test_configs_that_transformers_writes(tmp_path):
    from transformers import Gemma2Config, GPT2Config, LlamaConfig, Qwen3MoeConfig

    for config, hidden in (
        (LlamaConfig(hidden_size=96, intermediate_size=200, num_attention_heads=8, num_key_value_heads=2), 96),
        (GPT2Config(n_embd=48), 48),
        (Gemma2Config(hidden_size=96), 96),
        (Qwen3MoeConfig(hidden_size=96), 96),
    ):
        config.save_pretrained(tmp_path)
        sizes = plan(tokens=128, config=tmp_path / "config.json").sizes
        assert sizes == {"tokens": 128, "hidden": hidden, "vocab": config.vocab_size}
    LlamaConfig(hidden_size=96, intermediate_size=200, num_attention_heads=8, num_key_value_heads=2).save_pretrained(
        tmp_path
    )
    layers = plan("fp8_linear", tokens=128, config=tmp_path).rows
    assert [row.chunk["out_features"] for row in layers] == [96 + 2 * 24, 96, 400, 96]


def test_latent_attention(tmp_path):
    from transformers import DeepseekV3Config

    named = plan("attention", tokens=8192, model="deepseek-v3").sizes
    assert named == {"tokens": 8192, "heads": 128, "key_heads": 128, "head_size": 192, "value_size": 128}
    DeepseekV3Config().save_pretrained(tmp_path)
    assert plan("attention", tokens=8192, config=tmp_path).sizes == named
    with pytest.raises(ValueError, match="aren't all of the usual kind"):
        plan("fp8_linear", tokens=8192, config=tmp_path)
    config = {"hidden_size": 64, "vocab_size": 1000, "num_attention_heads": 4, "kv_lora_rank": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="aren't of the usual kind; give heads, key_heads, head_size, and value_size"):
        plan("attention", tokens=8192, config=tmp_path)


def test_a_config_that_lacks_a_size_takes_it_from_the_call(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 64}}')
    assert plan(tokens=8, config=tmp_path, vocab=1000).sizes["vocab"] == 1000
    with pytest.raises(ValueError, match="has no vocab size; give hidden and vocab"):
        plan(tokens=8, config=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        (
            '{"model_type": "vit", "image_size": 224}',
            "so it isn't a language model's config; give --hidden and --vocab",
        ),
        ('{"hidden_size": "4096"}', "hidden_size must be a number above 0; got '4096'"),
        ('{"hidden_size": 64.5}', "must be a whole number"),
        (None, "can't be read (No such file or directory); give a model's config.json"),
    ],
)
def test_a_wrong_config_is_a_message(tmp_path, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    result = run_cli("plan", "--tokens", "8", "--config", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
