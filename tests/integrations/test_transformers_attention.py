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
        how = {"attention_mask": left, "max_new_tokens": 6, "do_sample": False}
        texts = {}
        for way in ("eager", "onchip"):
            model.set_attn_implementation(way)
            texts[way] = model.generate(ids, **how)
        assert torch.equal(texts["eager"], texts["onchip"])
        assert torch.equal(texts["eager"], model.generate(ids, cache_implementation="static", **how))
        assert all(isinstance(mask, Intervals) for mask in calls)


@pytest.mark.parametrize("tokens", [3, 20, 24, 30])
def test_cross_attention(tokens, calls):
    """A query isn't the key of the same number: its keys may be padding there, or end before."""
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 4}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES | sizes | {"dropout": 0.0}))
    ids = torch.randint(3, 97, (ROWS, tokens), generator=torch.Generator().manual_seed(2))
    for kind in ("plain", "right", "left"):
        given, _ = batches()[kind]
        made = []
        for way in ("eager", "onchip"):
            model.set_attn_implementation(way)
            made.append(run(model, given | {"decoder_input_ids": ids}, torch.ones_like(ids)))
        (logits, grads), (ours, found) = made
        assert_near(ours, logits)
        for name in grads:
            assert_near(found[name], grads[name])
    assert all(isinstance(mask, Intervals) for mask in calls)


def dense(mask, queries, keys):
    low = mask.lower(ROWS, queries, keys, torch.zeros(1))
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    seen = (low.start[..., None] <= j) & (j < low.end[..., None])
    seen = seen if low.stop is None else seen & (i < low.stop[:, None])
    return (seen if low.blocks is None else seen & low.blocks).expand(ROWS, -1, -1)


def of_blocks(*runs):
    """Ids of blocks, each a run (id, length)."""
    return torch.cat([torch.full((n,), x) for x, n in runs]).repeat(ROWS, 1)


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(8, 8, 0), (3, 8, 5), (8, 5, 0), (1, 8, 7)])
def test_padding_anywhere(queries, keys, offset, at_hand, monkeypatch):
    """Also where numbers can't be read without waiting for a device."""
    if not at_hand:
        monkeypatch.setattr(transformers_attention, "_is_at_hand", lambda x: False)
    once, twice = of_blocks((-1, 1), (0, 2), (-1, 2), (1, 3)), of_blocks((-1, 1), (0, 2), (-1, 2), (0, 3))
    causal = masking_utils.causal_mask_function
    functions = {
        "causal": causal,
        "full": masking_utils.bidirectional_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(3),
        "both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
        "chunks": masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 2])),
        "images": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(once)),
        "one image": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(twice)),
        "mine": masking_utils.and_masks(causal, lambda b, h, q, k: k % 2 == 0),
    }
    causal_ones = functions.keys() - {"full", "both ways"}
    for pad in (None, [], [0, 1], [keys - 1], [0, 2, 3], list(range(keys))):
        there = None
        if pad is not None:
            there = torch.ones(ROWS, keys, dtype=torch.bool).index_fill(1, torch.tensor(pad, dtype=torch.long), False)
        for name, function in functions.items():
            given = (ROWS, queries, keys, offset, 0, function, there)
            made = transformers_attention.make_mask(*given).mask
            right = masking_utils.sdpa_mask(*given, allow_is_causal_skip=False)[:, 0].expand(ROWS, -1, -1)
            seen = dense(made, queries, keys)
            same = (seen == right).all(2)
            if there is not None and queries == keys and name in causal_ones:
                outside = (there.cumsum(1) == 0) | (there.flip(1).cumsum(1).flip(1) == 0)
                same |= outside & ~seen.any(2)  # padding before and after the tokens needs to see nothing
            assert bool(same.all()), (name, pad)
            assert isinstance(made, Intervals) or name in ("mine", "one image"), (name, pad)


def test_functions_of_callers_under_compile():
    """There nobody can look into a function."""

    config = transformers.MistralConfig(sliding_window=6, attn_implementation="onchip")
    masks = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask

    def make(x, given):
        made = [
            mask(config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, **more)
            for mask in masks
            for more in ({}, {"and_mask_function": lambda b, h, q, k: k % 2 == 0}, {"block_sequence_ids": given})
        ]
        return [mask.mask.lower(ROWS, TOKENS, TOKENS, x) for mask in made]

    x, ids = torch.zeros(ROWS, TOKENS, 8), of_blocks((-1, 3), (0, 4), (-1, 8), (0, 9))
    compiled = torch.compile(make, fullgraph=True, backend="eager")(x, ids)
    for ours, right in zip(compiled, make(x, ids), strict=True):
        assert torch.equal(dense(ours, TOKENS, TOKENS), dense(right, TOKENS, TOKENS))
    assert [mask.blocks is not None for mask in compiled] == [False, True, True] * 2


def test_masks_go_to_other_devices_and_are_not_read():
    """As accelerate moves the arguments of layers."""
    mask = transformers_attention.make_mask(ROWS, TOKENS, TOKENS, attention_mask=batches()["right"][1].bool())
    moved = mask.to("meta", non_blocking=True)
    assert all(x.is_meta for x in (moved.mask.start, moved.mask.end))
    assert moved.shape == (ROWS, 1, TOKENS, TOKENS)
    assert "Intervals" in str(moved)
    with pytest.raises(NotImplementedError, match="the model reads its mask"):
        mask[:, 0]


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
    names = [transformers_attention._name(x) for x in transformers_attention._leaves(mine)]
    assert names == ["causal_mask_function", ""]
    own = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(4))
    names = [transformers_attention._name(x) for x in transformers_attention._leaves(own)]
    assert names == ["causal_mask_function", "sliding_window_overlay"]
    assert set(names) <= transformers_attention._RANGES
    assert all(hasattr(masking_utils, x) for x in transformers_attention._RANGES | transformers_attention._COMBINED)


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
    module.config = transformers.LlamaConfig(output_attentions=True)
    with pytest.raises(NotImplementedError, match="never stored"):
        forward(module, x, x, x, None)
    assert forward(module, x, x, x, None, sliding_window=2, output_attentions=False)[0].shape == (1, 4, 2, 8)
    module.config = None
    assert forward(module, x[:, :, :1], x, x, None, is_causal=False)[0].shape == (1, 1, 2, 8)
