"""The 'mosaic_gpu' backend on the CPU: the whole op lowered for CUDA, its plans and its refusals."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from onchip.jax import linear_cross_entropy
from onchip.ops.linear_cross_entropy.checks import MODELS
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic import op as mosaic_op

MIB = 1 << 20


def lowered(tokens, hidden, vocab, *, dtype=jnp.bfloat16, layout="vh", argnums=(0, 1), bias=False, batch=(), **options):
    """StableHLO for CUDA of the loss and its gradients, or with no argnums of the loss."""
    shapes = [(*batch, tokens, hidden), (vocab, hidden) if layout == "vh" else (hidden, vocab), (*batch, tokens)]
    dtypes = [dtype, dtype, jnp.int32]
    if bias:
        shapes.append((vocab,))
        dtypes.append(dtype)
    op = partial(linear_cross_entropy, backend="mosaic_gpu", weight_layout=layout, **options)
    f = op
    if options.get("reduction") == "none":
        f = lambda *x: op(*x).sum()  # noqa: E731
    if argnums:
        f = jax.value_and_grad(f, argnums=argnums, has_aux=options.get("return_stats", False))
    if batch:
        f = jax.vmap(f, in_axes=(0, None, 0))
    arguments = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def launches(text):
    return text.count("custom_call @mosaic_gpu")


def not_in_place(text):
    """How many arrays kernels write that weren't there before."""
    calls = re.findall(r"custom_call @mosaic_gpu.*", text)
    return sum(call.rpartition(" -> ")[2].count("tensor<") - call.count("output_operand_alias<") for call in calls)


@pytest.mark.parametrize(
    ("model", "layout"), [("llama3.1-8b", "vh"), pytest.param("gpt-oss-120b", "hv", marks=pytest.mark.slow)]
)
def test_models_lower_and_nothing_is_copied(model, layout, as_on_hopper):
    more = model == "gpt-oss-120b"  # tokens than are kept
    text = lowered(4096, *MODELS[model], layout=layout, scratch_bytes=400 * MIB if more else None)
    # softmax, settle, hidden's product, weight's and the targets' terms once.  For tokens that aren't kept another
    # softmax, logits again and hidden's product: each is one kernel for groups of chunks of all sizes.
    assert launches(text) == 5 + 3 * more
    # What each softmax leaves of its tiles, and the targets' terms for columns.
    assert not_in_place(text) == 2 + 2 * more + (layout == "hv")
    assert "stablehlo.copy" not in text


@pytest.mark.slow
def test_exponentials_in_scratch_lower(as_on_hopper, monkeypatch):
    c = mosaic_spec.MosaicPlan(
        "stash", 1000, kept_in_gradient=256, chunk=512, kept_in_scratch=128, halves=True, recompute_chunks=2
    )
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: c)
    text = lowered(1000, 256, 4096, layout="hv")
    # The softmax of tokens that are kept, which are settled, and of others; hidden's product, and the targets' terms;
    # logits again, and both products, for groups of all sizes.
    assert launches(text) == 2 + 1 + 1 + 1 + 3
    assert "stablehlo.copy" not in text


@pytest.mark.parametrize(("layout", "argnums"), [("hv", (0, 1)), ("vh", (0,))])
def test_gradients_made_in_forward_lower(layout, argnums, as_on_hopper, monkeypatch):
    """The plan of many tokens, and that of a frozen weight."""
    c = mosaic_spec.MosaicPlan("stash", 384, chunk=4096, kept_in_scratch=384, by_tokens=True)
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: c)
    text = lowered(1000, 256, 4096, layout=layout, argnums=argnums, return_stats=True)
    # Of each chunk softmax, rebase and hidden's product, and the weight's; its scaling and the targets' terms.
    assert launches(text) == 3 + 3 * (1 in argnums)
    assert "stablehlo.copy" not in text


@pytest.mark.parametrize(
    ("layout", "dtype", "argnums", "first", "in_digits"),
    [
        ("vh", jnp.bfloat16, (0, 1), 512, 128),
        pytest.param("hv", jnp.float16, (0, 1), 640, 0, marks=pytest.mark.slow),
        pytest.param("vh", jnp.float16, (1,), 640, 128, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_larger_first_chunk_lowers(layout, dtype, argnums, first, in_digits, as_on_hopper, monkeypatch):
    c = mosaic_spec.MosaicPlan(
        "stash", 256, kept_in_gradient=256, chunk=768, kept_in_digits=in_digits, kept_in_scratch=384 - in_digits,
        by_tokens=True, first_chunk=first,
    )  # fmt: skip
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: c)
    text = lowered(1100, 512, 4096, layout=layout, dtype=dtype, argnums=argnums)
    # Of all chunks softmax, rebase and both products; the sum's scaling; the targets' terms.
    hidden, rounded = 0 in argnums, dtype == jnp.bfloat16
    assert launches(text) == 2 + hidden + 1 + 1 + rounded
    assert not_in_place(text) == (layout == "hv")  # the targets' terms for columns
    assert "stablehlo.copy" not in text


WEIGHTS = jnp.linspace(0, 2, 1088)
EVERYTHING = {
    "bias": True, "argnums": (0, 1, 3), "softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3, "return_stats": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "hv", "batch": (3,)},
        EVERYTHING,
        {"layout": "hv", "class_weight": WEIGHTS, "label_smoothing": 0.1, "dtype": jnp.float16},
    ],
    ids=str,
)
def test_options_lower(options, as_on_hopper):
    # More tokens than H, none of a multiple of 128, and a last tile of the vocabulary that isn't full.
    assert launches(lowered(300, 192, 1088, **options)) >= 3


@pytest.mark.parametrize(
    ("platform", "dtype", "layout", "hidden", "vocab", "reason"),
    [
        ("cpu", "bfloat16", "vh", 256, 1024, "NVIDIA GPUs, not on 'cpu'"),
        ("gpu", "float32", "vh", 256, 1024, "rounded to tf32"),
        ("gpu", "bfloat16", "vh", 264, 1024, "H to be a multiple of 64.*H=264"),
        ("gpu", "bfloat16", "vh", 64, 1024, "from 128 on.*H=64"),
        ("gpu", "bfloat16", "hv", 256, 64, "'hv', of 64 from 128.*V=64"),
        ("gpu", "bfloat16", "vh", 256, 1001, "V=1001"),
        ("gpu", "bfloat16", "hv", 256, 1032, "'hv', of 64.*V=1032"),
        ("gpu", "bfloat16", "vh", 256, 1024, "compute capability 9.0"),
    ],
)
def test_refusals(platform, dtype, layout, hidden, vocab, reason):
    said = mosaic_op.refusal(Problem(8, hidden, vocab, dtype, device="cuda"), platform, layout, "auto")
    assert said is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(said)


def problem(tokens, hidden, vocab, **changes):
    return Problem(tokens, hidden, vocab, "bfloat16", device="cuda", **changes)


@pytest.mark.parametrize("model", MODELS)
def test_how_much_is_kept(model):
    tokens = 4096
    p = problem(tokens, *MODELS[model])
    assert mosaic_spec.plan(p, "stash").kept_in_gradient == mosaic_spec.capacity(p)
    assert mosaic_spec.capacity(p) == min(tokens, p.hidden // 128 * 128)
    assert mosaic_spec.plan(p, "recompute").kept == 0
    assert mosaic_spec.plan(p, "auto", 1 << 40).kept == tokens
    forward = problem(tokens, *MODELS[model], grad_hidden=False, grad_weight=False)
    assert mosaic_spec.scratch_bytes(forward, mosaic_spec.plan(forward, "auto")) <= 64 * MIB


@pytest.mark.parametrize("tokens", [131072, 1 << 20])
def test_forward_of_very_many_tokens_is_not_cut_to_shreds(tokens):
    p = problem(tokens, *MODELS["llama3.1-8b"], grad_hidden=False, grad_weight=False)
    c = mosaic_spec.plan(p, "auto")
    assert c.token_chunk >= 1024
    assert mosaic_spec.scratch_bytes(p, c) <= mosaic_spec.default_scratch(p, "auto") < 64 * MIB + 512 * tokens


def test_chunks_cover_the_vocabulary_once():
    for vocab in (512, 1088, 50304, 128256):
        for chunk in (256, 4096, 8192):
            if 2 * chunk > vocab:
                continue
            for together, again in ((1, True), (1, False), (2, True), (3, True), (8, True)):
                c = mosaic_spec.MosaicPlan("stash", 256, 256, chunk, recompute_chunks=together)
                groups = mosaic_spec.groups(vocab, c, recomputed=again)
                at = 0
                for group in groups:
                    assert group.first == at
                    assert all(size % 256 == 0 for size, _ in group.chunks)
                    assert not again or group.size <= max(together * chunk, chunk + 256)
                    at += group.size * group.times
                assert at == mosaic_spec.up(vocab, 256)
                # What is kept a chunk further on still has room there.
                assert groups[-1].first + chunk <= vocab
                assert again or len(groups) <= 3


def test_more_memory_keeps_more():
    p = problem(4096, *MODELS["gemma3-4b"])
    kept = [mosaic_spec.plan(p, "auto", budget * MIB).kept_in_scratch for budget in (128, 512, 2048)]
    assert kept == sorted(kept)
    assert kept[-1] == 4096 - 2560


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"grad_bias": True}, 0),
        ({"softcap": True, "smoothing": True}, 0),
        ({"class_weight": True, "smoothing": True}, 0),
        ({"class_weight": True}, 4096),
        ({"softcap": True}, 4096),
        ({"smoothing": True}, 4096),
        ({"grad_weight": False, "per_token_loss": True}, 1024),  # of a chunk
    ],
)
def test_what_keeps_nothing(changes, kept):
    p = problem(4096, 4096, 131072, **changes)
    c = mosaic_spec.plan(p, "stash")
    assert (c.strategy, c.kept) == ("stash" if kept else "recompute", kept)
    assert c.by_tokens == (not p.grad_weight)


def test_many_tokens_have_their_gradients_made_in_forward():
    p = problem(32768, 1024, 151936)
    eighth = 4 * p.tokens * p.vocab // 8
    assert mosaic_spec.plan(p, "auto", eighth).by_tokens
    # Half of both sums is in the memory of the gradients: that leaves room for chunks whose addition costs little.
    large = problem(32768, 4096, 128256)
    c = mosaic_spec.plan(large, "auto", 4 * large.tokens * large.vocab // 8)
    assert c.by_tokens
    assert c.token_chunk >= 2048
    # Not for an upstream gradient by token, and not by name.
    assert not mosaic_spec.plan(replace(p, per_token_loss=True), "auto", eighth).by_tokens
    assert not mosaic_spec.plan(p, "recompute", eighth).by_tokens


@pytest.mark.parametrize("changes", [{"grad_weight": False}, {"per_token_loss": True}, {"grad_bias": True}], ids=str)
def test_the_first_chunk_has_tokens_in_the_memory_of_the_weight_gradient_too(changes):
    p = problem(8192, 2048, 128256)
    eighth = 4 * p.tokens * p.vocab // 8
    c = mosaic_spec.plan(p, "auto", eighth)
    assert c.token_chunks(p.tokens) == [3072, *[1024] * 5]
    assert c.kept_in_gradient == p.hidden
    equal = replace(c, first_chunk=0, kept_in_gradient=0, kept_in_digits=0, kept_in_scratch=1024, chunk=p.vocab)
    assert mosaic_spec.predict(p, c) < 0.98 * mosaic_spec.predict(p, equal)
    # What is in the gradient's memory takes none, but for the last entries' and for hidden's gradient.
    more = mosaic_spec.scratch_bytes(p, c) - mosaic_spec.scratch_bytes(p, equal)
    assert 0 < more < 2 * c.kept_in_gradient * c.chunk + 10 * c.first_chunk * p.hidden
    # Not where it isn't a sum over chunks that the gradient is made as.
    assert mosaic_spec.plan(replace(p, **changes), "auto", eighth).first_chunk == 0


def test_a_longer_first_chunk_saves_more_than_it_takes_to_compile():
    def chunks_of(p):
        return mosaic_spec.plan(p, "auto", mosaic_spec.default_scratch(p, "auto")).token_chunks(p.tokens)

    p = problem(8192, 2048, 128256)
    assert chunks_of(p) == [2048] * 4
    longer = mosaic_spec._longer_first(p, mosaic_spec.default_scratch(p, "auto"))
    assert 0.985 < min(mosaic_spec.predict(p, c) for c in longer) / mosaic_spec.predict(p, mosaic_spec.plan(p)) < 1
    assert chunks_of(problem(8192, 4096, 128256)) == [6656, 1536]  # it saves 4%
    assert chunks_of(problem(4096, *MODELS["gemma3-4b"])) == [3328, 768]  # and 15%


@pytest.mark.parametrize(
    ("hidden", "layout", "tokens", "turns"),
    [
        (4096, "vh", 512, True),
        (4096, "vh", 2049, False),
        (1024, "vh", 512, False),  # an eighth of the last tile would be empty
        (1024, "hv", 512, True),
        (576, "vh", 512, True),
    ],
)
def test_warpgroups_take_turns_with_few_tokens_whose_tiles_fill_rows(hidden, layout, tokens, turns):
    tiles = mosaic_spec.heuristic_tiles(hidden, layout, tokens)
    assert tiles["mosaic_weight_at_once"].get("alternate", 0) == turns
    assert "alternate" not in tiles["mosaic_weight_product"]


@pytest.mark.slow
def test_too_much_shared_memory(as_on_hopper, monkeypatch):
    large = {name: tile | {"stages": 7} for name, tile in mosaic_spec.heuristic_tiles().items()}
    monkeypatch.setattr(mosaic_spec, "heuristic_tiles", lambda *_: large)
    jax.clear_caches()
    with pytest.raises(
        ValueError, match=r"softmax_tiles.* needs \d+ bytes of shared memory, of which a block has 232448"
    ):
        lowered(300, 192, 1088, argnums=())
