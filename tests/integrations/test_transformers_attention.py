"""transformers' models with attention under masks that are data have their own outputs and gradients."""

import pytest
import torch
import transformers
from transformers import masking_utils

from onchip.integrations import transformers_attention
from onchip.integrations.transformers import register_attention
from onchip.masks import Blocked, Intervals

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 7, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 7, **EXPERTS},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], **EXPERTS},
}
ROWS, TOKENS = 2, 24


@pytest.fixture(autouse=True)
def registered():
    register_attention()
    yield
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop("onchip")


@pytest.fixture
def calls(monkeypatch):
    """The masks of the calls of `attention`."""
    seen, run = [], transformers_attention.attention

    def counted(*given, **named):
        seen.append(given[3])
        return run(*given, **named)

    monkeypatch.setattr(transformers_attention, "attention", counted)
    return seen


def build(kind, **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | MODELS.get(kind, {}) | more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, x in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(x)
    return model


def batches():
    ids = torch.randint(3, 97, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    right[1, 17:], left[0, :5] = 0, 0
    packed = torch.cat([torch.arange(9), torch.arange(1), torch.arange(14)]).repeat(ROWS, 1)
    return {
        "plain": ({"input_ids": ids}, torch.ones_like(ids)),
        "packed": ({"input_ids": ids, "position_ids": packed}, torch.ones_like(ids)),
        "right": ({"input_ids": ids, "attention_mask": right}, right),
        "left": ({"input_ids": ids, "attention_mask": left}, left),
    }


def run(model, given, there):
    logits = model(**given, use_cache=False).logits[there.bool()]
    weight = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    model.zero_grad()
    (logits * weight).sum().backward()
    return logits.detach(), {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


def assert_near(made, expected):
    assert (made - expected).norm() <= 1e-5 * (expected.norm() + 1)


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_are_eagers(kind, calls):
    model = build(kind)
    for given, there in batches().values():
        model.set_attn_implementation("eager")
        logits, grads = run(model, given, there)
        assert not calls
        model.set_attn_implementation("onchip")
        made, found = run(model, given, there)
        assert calls
        assert all(isinstance(mask, Intervals) for mask in calls)
        assert_near(made, logits)
        assert set(found) == set(grads)
        for name in grads:
            assert_near(found[name], grads[name])
        calls.clear()


def test_generation_with_a_cache(calls):
    for kind in ("llama", "mistral", "gpt_oss"):
        model = build(kind).eval()
        ids = batches()["plain"][0]["input_ids"]
        left = batches()["left"][1]
        texts = {}
        for way in ("eager", "onchip"):
            model.set_attn_implementation(way)
            texts[way] = model.generate(ids, attention_mask=left, max_new_tokens=6, do_sample=False)
        assert torch.equal(texts["eager"], texts["onchip"])
        assert all(isinstance(mask, Intervals) for mask in calls)
    how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    static = model.generate(ids, attention_mask=left, **how)
    assert torch.equal(static, texts["eager"])


def dense(mask, queries, keys):
    low = mask.lower(ROWS, queries, keys, torch.zeros(1))
    j = torch.arange(keys)
    if low.blocks is not None:
        return low.blocks.expand(ROWS, -1, -1)
    return (low.start[..., None] <= j) & (j < low.end[..., None])


def masks_of(config, make, **given):
    """Ours and transformers' own, of the same call."""
    made = []
    for way in ("onchip", "sdpa"):
        config._attn_implementation = way
        x = torch.zeros(ROWS, TOKENS, 8)
        more = {} if way == "onchip" else {"allow_is_causal_skip": False}
        made.append(
            make(config=config, inputs_embeds=x, past_key_values=None, **{"attention_mask": None} | given | more)
        )
    return made[0].mask, made[1]


IDS = torch.full((ROWS, TOKENS), -1)
IDS[:, 3:7], IDS[1, 10:19] = 0, 1


@pytest.mark.parametrize(
    ("make", "given", "ranges"),
    [
        (masking_utils.create_causal_mask, {"block_sequence_ids": IDS}, True),
        (masking_utils.create_sliding_window_causal_mask, {"block_sequence_ids": IDS}, True),
        (masking_utils.create_causal_mask, {"or_mask_function": masking_utils.blockwise_overlay(IDS),
                                            "and_mask_function": masking_utils.sliding_window_overlay(6)}, True),
        (masking_utils.create_causal_mask, {"and_mask_function": lambda b, h, q, k: (q - k) % 2 == 0}, False),
        (masking_utils.create_causal_mask, {"or_mask_function": lambda b, h, q, k: k > 20}, False),
        (masking_utils.create_causal_mask, {"and_mask_function": lambda b, h, q, k: k < q}, False),
    ],
)  # fmt: skip
def test_masks_of_images_and_of_callers(make, given, ranges):
    """One that is no range is taken pair by pair, never ignored."""
    config = transformers.MistralConfig(sliding_window=6)
    ours, theirs = masks_of(config, make, **given)
    assert torch.equal(dense(ours, TOKENS, TOKENS), theirs[:, 0].expand(ROWS, -1, -1))
    assert isinstance(ours, Intervals if ranges else Blocked)


def test_functions_of_callers_are_told_from_transformers_own():
    mine = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 5)
    leaves = list(transformers_attention._leaves(mine))
    assert [transformers_attention._is_known(x) for x in leaves].count(False) == 1
    own = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(4))
    assert all(map(transformers_attention._is_known, transformers_attention._leaves(own)))


def test_lengths_of_documents_are_used():
    model = build("llama")
    model.set_attn_implementation("onchip")
    given, _ = batches()["packed"]
    ids, places = given["input_ids"][:1], given["position_ids"][:1]
    lengths = torch.tensor([0, 9, 10, 24], dtype=torch.int32)
    expected = model(input_ids=ids, position_ids=places, use_cache=False).logits
    one = torch.ones_like(ids)
    made = model(
        input_ids=ids, position_ids=places, attention_mask=one, use_cache=False, cu_seq_lens_q=lengths,
        cu_seq_lens_k=lengths,
    ).logits  # fmt: skip
    torch.testing.assert_close(made, expected)
    with pytest.raises(NotImplementedError, match="one row"):
        model(**given, use_cache=False, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)


def test_matrices_in_place_of_masks():
    model = build("llama")
    ids = batches()["plain"][0]["input_ids"]
    seen = torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    seen[:, :, 5:, 2] = False
    model.set_attn_implementation("sdpa")
    expected = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
    model.set_attn_implementation("onchip")
    torch.testing.assert_close(model(input_ids=ids, attention_mask=seen, use_cache=False).logits, expected)
    with pytest.raises(NotImplementedError, match="must be bool"):
        model(input_ids=ids, attention_mask=seen.float(), use_cache=False)


def test_what_is_refused():
    x = torch.zeros(1, 2, 4, 8)
    forward, module = transformers_attention.attention_forward, torch.nn.Module()
    for given, message in (
        ({"dropout": 0.1}, "no dropout"),
        ({"position_bias": x}, "position_bias"),
        ({"output_attentions": True}, "never stored"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            forward(module, x, x, x, None, **given)
    with pytest.raises(NotImplementedError, match="no mask was made for 3 queries and 4 keys"):
        forward(module, x[:, :, :3], x, x, None)
    assert forward(module, x, x, x, None, sliding_window=2)[0].shape == (1, 4, 2, 8)
    assert forward(module, x[:, :, :1], x, x, None, is_causal=False)[0].shape == (1, 1, 2, 8)
