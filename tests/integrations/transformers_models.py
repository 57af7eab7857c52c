"""Tiny random models of every causal type of transformers, patched against unpatched.

    python tests/integrations/transformers_models.py > docs/guides/transformers_models.md

makes the table of the docs, of all types; test_transformers_models.py runs those in `TESTED`.
"""

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
# Of types that none of the above suits.
SPECIAL = {
    "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "codegen": ROTARY,
    "gpt_neo": {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
                "attention_types": [[["global", "local"], 1]]},
    "gptj": ROTARY,
    "mamba2": PLAIN | {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 8},
    "mpt": {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "reformer": None,  # its loss needs sequences of a multiple of its chunks
}  # fmt: skip
LARGEST = 6_000_000  # parameters
# One of each architecture that many use, and each kind of head: tied, with a bias, scaled, capped, sliced.
TESTED = """
apertus arcee bart bert-generation biogpt bitnet blenderbot-small bloom codegen cohere cohere2 deepseek_v2
deepseek_v3 diffllama dots1 electra ernie4_5 ernie4_5_moe exaone4 falcon flex_olmo gemma gemma2 gemma3_text glm glm4
glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense
jamba jetmoe lfm2 llama llama4_text mamba marian mbart minimax ministral mistral mixtral modernbert-decoder mpt
nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next
recurrent_gemma seed_oss smollm3 stablelm starcoder2 trocr vaultgemma xglm xlm-roberta
""".split()  # noqa: SIM905 - a list of 77 lines says no more


def build(model_type):
    """A model of at most so many parameters, or the reason why there is none."""
    made, why = transformers.CONFIG_MAPPING[model_type], ""
    ways = [SPECIAL[model_type]] if model_type in SPECIAL else [TINY, TINY | MOE, PLAIN, TINY | LATENT, PLAIN | LATENT]
    for way in ways:
        if way is None:
            return None, "no small config"
        try:
            config = made(**way)
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
            why = why or f"{type(error).__name__}: {error}".split("\n")[0]
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
        f"Made by `tests/integrations/transformers_models.py` with transformers {transformers.__version__}: a step of"
    )
    print("a tiny random model of each causal type, patched against unpatched, in float32 on the CPU.\n")
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
        else:
            rest.append((model_type, str(report).replace("\n", ";")))
        print(model_type, file=sys.stderr)
    print(f"The loss of {len(fused)} types is fused, within 1e-5 of the unpatched loss and gradients:")
    print(", ".join(f"`{x}`" for x in fused) + ".\n")
    print("| other types | |\n|---|---|")
    for model_type, why in rest:
        print(f"| `{model_type}` | {why.replace('|', '/')[:160]} |")


if __name__ == "__main__":
    main()
