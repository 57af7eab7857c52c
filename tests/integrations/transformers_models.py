"""Tiny random models of every causal type of transformers, patched against unpatched.

    python tests/integrations/transformers_models.py > docs/guides/transformers_models.md

makes the table of the docs, of all types; test_transformers_models.py runs those in `TESTED`.
"""

import copy
import sys
import warnings

import torch
import transformers

from onchip.integrations.transformers import patch

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MOE = {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = MOE | {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
PLAIN = {name: x for name, x in TINY.items() if name not in ("head_dim", "num_key_value_heads")}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ROTARY = GPT | {"rotary_dim": 4}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8, "depth": 1, "num_heads": 4, "out_hidden_size": 32,
}  # fmt: skip
BOTH_HALVES = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
BY_LAYER = TINY | {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "global_head_dim": 8}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 8}
BYTES = TINY | {"num_hidden_layers": 1, "num_key_value_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Of types that none of the above suits; or why there is no small model that takes a batch of text.
SPECIAL = {
    "bamba": TINY | STATES | {"attn_layer_indices": [1]},
    "blenderbot": BOTH_HALVES,
    "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "blt": {"vocab_size": 97, "max_position_embeddings": 64, "patch_in_forward": False,
            "encoder_hash_byte_group_vocab": 50, "global_config": BYTES, "patcher_config": BYTES,
            "encoder_config": BYTES | {"hidden_size_global": 32}, "decoder_config": BYTES | {"hidden_size_global": 32}},
    "codegen": ROTARY,
    "cohere_compass_text": TINY | {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
    "emu3": {"text_config": TINY, "vocabulary_map": {"<image>": 3},
             "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 4,
                           "latent_channels": 4, "codebook_size": 16, "hidden_size": 32, "attn_resolutions": []}},
    "gemma3": {"text_config": TINY, "vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma3n": "its images need timm, which isn't installed",
    "gemma3n_text": BY_LAYER | {"num_kv_shared_layers": 0, "laurel_rank": 4},
    "gemma4": {"text_config": BY_LAYER, "vision_config": VISION},
    "gemma4_assistant": "it drafts for a larger model, and takes its keys and values",
    "gemma4_text": BY_LAYER,
    "gemma4_unified": {"text_config": BY_LAYER},
    "gemma4_unified_assistant": "it drafts for a larger model, and takes its keys and values",
    "git": "its loss needs an image",
    "got_ocr2": {"text_config": TINY,
                 "vision_config": {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1,
                                   "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "window_size": 2,
                                   "global_attn_indexes": [0], "mlp_dim": 48}},
    "gpt_neo": {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
                "attention_types": [[["global", "local"], 1]]},
    "gptj": ROTARY,
    "granitemoehybrid": TINY | MOE | STATES | {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": TINY | MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"text_config": TINY | MOE | {"intermediate_size_mlp": 48},
               "vision_config": VISION | {"vision_output_dim": 32, "projector_input_dim": 32,
                                          "projector_output_dim": 32}},
    "mamba2": PLAIN | {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 8},
    "mllama": {"text_config": TINY | {"cross_attention_layers": [1]},
               "vision_config": VISION | {"num_global_layers": 1, "vision_output_dim": 64, "attention_heads": 4,
                                          "intermediate_layers_indices": [0]}},
    "moss_transcribe_diarize": {"text_config": TINY,
                                "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4,
                                                 "encoder_ffn_dim": 48, "hidden_size": 32}},
    "mpt": {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "musicgen": "it has a head for each of several codebooks",
    "musicgen_melody": "it has a head for each of several codebooks",
    "phi4_multimodal": TINY | {"vision_config": VISION,
                               "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1,
                                                "num_attention_heads": 4}},
    "plbart": BOTH_HALVES,
    "prophetnet": {"vocab_size": 97, "hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1,
                   "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 48,
                   "decoder_ffn_dim": 48, "max_position_embeddings": 64},
    "qwen3_5": {"text_config": TINY, "vision_config": VISION},
    "qwen3_5_moe": {"text_config": TINY | MOE, "vision_config": VISION},
    "qwen4_exp": {"text_config": TINY | MOE},
    "reformer": {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8,
                 "feed_forward_size": 48, "max_position_embeddings": 64, "axial_pos_embds": False, "is_decoder": True,
                 "attn_layers": ["local"], "local_attn_chunk_length": 4, "num_hidden_layers": 1,
                 "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0},
    "roc_bert": PLAIN | {"pronunciation_vocab_size": 50, "shape_vocab_size": 50, "pronunciation_embed_dim": 8,
                         "shape_embed_dim": 8},
    "whisper": BOTH_HALVES,
    "xlnet": {"vocab_size": 97, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "xmod": PLAIN | {"default_language": "en_XX"},
    "zamba": TINY | {"num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 2,
                     "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": TINY | {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "num_mem_blocks": 1,
                      "layers_block_type": ["mamba", "hybrid"]},
    "zaya": TINY | {"num_experts": 4},
}  # fmt: skip
LARGEST = 6_000_000  # parameters
# One of each architecture that many use, and each kind of head: tied, with a bias, scaled, capped, sliced.
TESTED = """
apertus arcee bamba bart bert-generation biogpt bitnet blenderbot-small bloom blt codegen cohere cohere2 dbrx
deepseek_v2 deepseek_v3 diffllama dots1 electra ernie4_5 ernie4_5_moe exaone4 falcon flex_olmo gemma gemma2 gemma3
gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoeshared
helium hunyuan_v1_dense jamba jetmoe lfm2 llama llama4 llama4_text mamba marian mbart minimax ministral mistral
mixtral modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe
qwen3 qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 stablelm starcoder2 trocr vaultgemma xglm xlm-roberta
xlnet
""".split()  # noqa: SIM905 - a list of 83 lines says no more


def build(model_type):
    """A model of at most so many parameters, or the reason why there is none."""
    made, why = transformers.CONFIG_MAPPING[model_type], ""
    ways = [SPECIAL[model_type]] if model_type in SPECIAL else [TINY, TINY | MOE, PLAIN, TINY | LATENT, PLAIN | LATENT]
    for way in ways:
        if isinstance(way, str):
            return None, way
        try:
            config = made(**copy.deepcopy(way))  # some change what they are given
            with torch.device("meta"):
                size = sum(p.numel() for p in make(config).parameters())
            if size > LARGEST:
                why = f"{size / 1e6:.0f} million parameters"
                continue
            torch.manual_seed(0)
            model = make(config).float().train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            step(model)
            return model, ""
        except Exception as error:
            why = why or " ".join(f"{type(error).__name__}: {error}".split())
    return None, why


def make(config):
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def step(model):
    """The loss, logits and gradients of a batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (2, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    model.zero_grad()
    torch.manual_seed(2)
    made = model(input_ids=ids, labels=labels, use_cache=False)
    made.loss.backward()
    return made, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model):
    """The report of a patched step, and how far its loss and its gradients are from the unpatched one's; of a gradient
    relative to its norm and a thousandth of that of all, since some are nothing but roundings."""
    expected, grads = step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = patch(model)
        made, found = step(model)
    assert set(found) == set(grads)
    norm = sum(g.norm().square() for g in grads.values()).sqrt()
    error = max(float((found[name] - g).norm() / (g.norm() + norm / 1000)) for name, g in grads.items())
    return report, abs(float(made.loss.detach() - expected.loss.detach())), error


def main():
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    print("# Models of transformers\n")
    print(
        "Which models [`patch`](transformers.md) fuses, by `model_type` of their config. The page is made by\n"
        "`tests/integrations/transformers_models.py`, which takes a step of a tiny random model of each causal type,\n"
        f"patched and unpatched, in float32 on the CPU, with transformers {transformers.__version__}.\n"
    )
    rest, fused = [], []
    for model_type in sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        model, why = build(model_type)
        if model is None:
            rest.append((model_type, f"not tried: {why}"))
            continue
        report, loss, grads = compare(model)
        good = loss < 1e-5 and grads < 1e-5
        if report.losses == 1 and not report.materialized and good:
            fused.append(model_type)
        elif not good:
            rest.append((model_type, f"differs by {loss:.0e} and {grads:.0e}"))
        elif report.fused:
            asked = ", ".join(report.materialized)
            rest.append(
                (model_type, f"the logits are stored, since its own loss asks for them ({asked}); same results")
            )
        else:
            rest.append((model_type, str(report)))
        print(model_type, file=sys.stderr)
    print(f"For {len(fused)} types the loss is fused; loss and gradients are within 1e-5 of the unpatched model's:")
    print(", ".join(f"`{x}`" for x in fused) + ".\n")
    print("| other types | what happens |\n|---|---|")
    for model_type, why in rest:
        print(f"| `{model_type}` | {why.replace('|', '/')[:200]} |")


if __name__ == "__main__":
    main()
