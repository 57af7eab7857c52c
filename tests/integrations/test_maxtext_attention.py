"""MaxText's attention: what stands for `AttentionOp.apply_attention` against a softmax of all scores, and `install`.

MaxText's module is stood in for by one with the names that are used of it.
"""

import inspect
from enum import Enum
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.integrations import maxtext_attention as integration
from onchip.integrations import versions
from onchip.integrations.maxtext import install_attention, uninstall_attention

EINSUMS = {"qk_product_einsum": None, "wv_product_einsum": None}
rng = np.random.default_rng(0)
q, k, v = (
    jax.device_put(np.float32(rng.standard_normal(shape))) for shape in ((2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6))
)
segments = jnp.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 9 + [-1] * 3])
sinks = jax.device_put(np.float32(rng.standard_normal(4)))
i, j = np.arange(12)[:, None], np.arange(12)
SEEN = {
    "global": j <= i,
    "mla": j <= i,
    "full": i == i,
    "local_sliding": (j <= i) & (i - j < 3),
    "chunk": (j <= i) & (i // 5 == j // 5),
}


class AttentionType(Enum):
    GLOBAL, MLA, FULL, LOCAL_SLIDING, CHUNK, COMPRESSED = (
        "global",
        "mla",
        "full",
        "local_sliding",
        "chunk",
        "compressed",
    )


class AttentionOp:
    """As MaxText's, as far as it is used."""

    def __init__(self, attention_type="global", attention_kernel="cudnn_flash_te", **changes):
        self.attention_type, self.attention_kernel = AttentionType(attention_type), attention_kernel
        self.sliding_window_size, self.chunk_attn_window_size, self.attn_logits_soft_cap = 3, 5, None
        self.dropout_rate, self.config, self.context = 0.1, SimpleNamespace(moba=False, enable_dropout=False), 1
        vars(self).update(changes)

    def _context_parallel_size(self):
        return self.context

    def apply_attention(self, *given, **named):
        return given, named


AttentionOp.apply_attention.__module__ = integration.HOME
AttentionOp.apply_attention.__signature__ = inspect.signature(integration.apply_attention)


@pytest.fixture
def layer(stand_in, monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda distribution: "0.2.5")
    stand_in(integration.HOME, {"AttentionOp": AttentionOp})
    assert "with attention 'cudnn_flash_te' runs through onchip" in str(install_attention())
    yield AttentionOp
    uninstall_attention()


def call(layer, *arrays, segments=segments, mode="train", **options):
    return layer.apply_attention(*arrays, segments, None, None, mode, **options, **EINSUMS)


def plain(q, k, v, sinks, seen, softcap):
    """[B, S, N, Dv] of all scores; 0 where a query sees nothing."""
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    s = jnp.einsum("bind,bjnd->bnij", q, k, precision="highest")
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(np.broadcast_to(seen, (2, 12, 12))[:, None], s, -jnp.inf)
    p = jax.nn.softmax(jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (2, 4, 12, 1))], -1), -1)
    return jnp.einsum("bnij,bjnd->bind", p[..., :-1], v, precision="highest")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", SEEN)
def test_attention(layer, kind, packed):
    ids = np.asarray(segments)
    seen = SEEN[kind] & ((ids[:, :, None] == ids[:, None]) & (ids[:, None] >= 0) if packed else True)
    softcap = 2.0 if kind == "mla" else None
    op = layer(kind, attn_logits_soft_cap=softcap)

    def ours(q, k, v, sinks):
        out, *rest = call(op, q, k, v, segments=segments if packed else None, sinks=sinks)
        assert rest == [None, None]
        return out

    given = (q, k, v, sinks)
    np.testing.assert_allclose(jax.jit(ours)(*given), plain(*given, seen, softcap), atol=2e-5)
    made, expected = (
        jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2, 3))(*given)
        for f in (ours, lambda *x: plain(*x, seen, softcap))
    )
    for x, y in zip(made, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_without_sinks(layer):
    out = call(layer(), q, k, v)[0]
    alone = call(layer(), q[:, 5:9], k[:, 5:9], v[:, 5:9], segments=None)[0]
    np.testing.assert_allclose(out[0, 5:9], alone[0], atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"bidirectional_mask": segments}, "no bidirectional_mask; set attention to 'dot_product' or another"),
        ({}, {"indexer_mask": q, "record_max_logits": True}, "no indexer_mask, record_max_logits; set"),
        ({}, {"mode": "prefill"}, "no model_mode 'prefill'; set"),
        ({"attention_type": "compressed"}, {}, "no attention_type 'compressed'; set"),
        ({"config": SimpleNamespace(moba=True, enable_dropout=True)}, {}, "no moba, dropout_rate above 0; set"),
        ({"context": 2}, {}, "no context parallelism; set"),
    ],
)
def test_refused(layer, changes, options, message):
    with pytest.raises(NotImplementedError, match=message):
        call(layer(**changes), q, k, v, **options)
    if not changes:
        with pytest.raises(NotImplementedError, match="no quantised keys; set"):
            call(layer(), q, SimpleNamespace(dequant=None), v)


def test_other_kernels_are_maxtexts(layer):
    given, named = call(layer(attention_kernel="dot_product"), q, k, v, sinks=sinks, compress_ratio=4)
    assert given[0] is q
    assert (named["sinks"] is sinks, named["compress_ratio"]) == (True, 4)


def test_install(layer, monkeypatch):
    install_attention()
    assert AttentionOp.apply_attention is integration.apply_attention
    for _ in range(2):
        uninstall_attention()
        assert AttentionOp.apply_attention is not integration.apply_attention
    monkeypatch.setattr(AttentionOp, "apply_attention", lambda self: None)
    with pytest.raises(RuntimeError, match=r"AttentionOp\.apply_attention was replaced by .*; undo that first"):
        install_attention()
    monkeypatch.setattr(versions, "installed_version", lambda distribution: "0.2.4")
    with pytest.raises(RuntimeError, match=r"this is maxtext 0\.2\.4, but onchip knows the interface of maxtext"):
        install_attention()
