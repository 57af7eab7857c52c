"""Levanter's attention: the function that replaces its own, against a softmax of all scores; refusals, and `install`.

Modules with the names that are used replace Levanter and Haliax.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.integrations import levanter_attention as integration
from onchip.integrations.levanter import install_attention, uninstall_attention
from onchip.integrations.levanter_attention import named_attention


@dataclass(frozen=True)
class Axis:
    name: str
    size: int


@dataclass(frozen=True, eq=False)
class Named:
    """As Haliax's NamedArray, as far as it is used."""

    array: Any
    axes: tuple[Axis, ...]
    dtype = property(lambda self: self.array.dtype)

    def resolve_axis(self, axis):
        return next(x for x in self.axes if axis in (x, x.name))

    def rearrange(self, axes):
        return Named(jnp.transpose(self.array, [self.axes.index(x) for x in axes]), tuple(axes))

    def broadcast_axis(self, axis):
        return Named(jnp.broadcast_to(self.array, (axis.size, *self.array.shape)), (axis, *self.axes))

    def rename(self, names):
        return Named(self.array, tuple(Axis(names.get(x.name, x.name), x.size) for x in self.axes))

    def astype(self, dtype):
        return Named(self.array.astype(dtype), self.axes)


@dataclass(frozen=True)
class AttentionMask:
    """As Levanter's."""

    is_causal: bool = False
    causal_offset: Any = None
    explicit_mask: Any = None
    segment_ids: Any = None
    sliding_window: int | None = None
    bidirectional_window: int | None = None


BATCH, HEADS, GROUP, SIZE = Axis("batch", 2), Axis("kv_head", 2), Axis("group", 3), Axis("head_size", 8)
AT, KEYS = Axis("position", 12), Axis("key_position", 12)


def normal(seed, *axes):
    return Named(jax.device_put(np.float32(np.random.default_rng(seed).standard_normal([x.size for x in axes]))), axes)


q, k, v = (
    normal(0, BATCH, HEADS, GROUP, AT, SIZE),
    normal(1, BATCH, HEADS, KEYS, SIZE),
    normal(2, BATCH, HEADS, KEYS, SIZE),
)
i, j = np.arange(12)[:, None], np.arange(12)
ids = np.array([[0] * 5 + [1] * 3 + [-1] * 4, [7] * 10 + [2] * 2])
other_ids = np.array([[1] * 2 + [0] * 6 + [3] * 4, [2] * 4 + [7] * 8])
segments = Named(jnp.asarray(ids), (BATCH, AT))
causal = AttentionMask(is_causal=True)
same = ids[:, :, None] == ids[:, None]
by_row = Named(jnp.array([0, 2]), (BATCH,))
MASKS = {
    "none": (None, i == i),
    "causal": (causal, j <= i),
    "offset": (replace(causal, causal_offset=Named(jnp.array(2), ())), j <= i + 2),
    "offset by row": (replace(causal, causal_offset=by_row), j <= i + np.array([[[0]], [[2]]])),
    "window": (AttentionMask(sliding_window=4), (j <= i) & (i - j < 4)),
    "both ways": (AttentionMask(bidirectional_window=3), abs(i - j) <= 3),
    "segments": (replace(causal, segment_ids=(segments, segments)), (j <= i) & same),
    "a row's segments": (
        AttentionMask(segment_ids=(Named(segments.array[0], (AT,)),) * 2, sliding_window=3),
        same[:1] & (j <= i) & (i - j < 3),
    ),
    "keys' segments": (
        AttentionMask(segment_ids=(segments, Named(jnp.asarray(other_ids), (BATCH, AT)))),
        ids[:, :, None] == other_ids[:, None],
    ),
}


def plain(q, k, v, seen, scale=8**-0.5, softcap=None, sinks=None):
    """[batch, kv_head, group, position, head_size] of all scores; 0 where a query sees nothing."""
    s = jnp.einsum("bhgtd,bhsd->bhgts", q, k, precision="highest") * scale
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(np.broadcast_to(seen, (2, 12, 12))[:, None, None], s, -jnp.inf)
    sink = jnp.full((2, 3), -1e30) if sinks is None else sinks
    p = jax.nn.softmax(jnp.concatenate([s, jnp.broadcast_to(sink[..., None, None], (*s.shape[:-1], 1))], -1), -1)
    return jnp.einsum("bhgts,bhsd->bhgtd", p[..., :-1], v, precision="highest")


@pytest.fixture(autouse=True)
def haliax(stand_in):
    stand_in("haliax", {"named": lambda array, axes: Named(array, tuple(axes))})


def ours(mask, q=q, k=k, v=v, **options):
    return named_attention("position", "key_position", "head_size", q, k, v, mask, **options)


def agree(made, right):
    made, right = made.array, np.asarray(right)
    assert made.shape == right.shape
    np.testing.assert_allclose(made, right, atol=2e-5)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, seen = MASKS[name]
    agree(ours(mask), plain(q.array, k.array, v.array, seen))

    def loss(attend):
        return jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))(q.array, k.array, v.array)

    made = loss(lambda *x: ours(mask, *(Named(a, b.axes) for a, b in zip(x, (q, k, v), strict=True))).array)
    for x, y in zip(made, loss(lambda *given: plain(*given, seen)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_options_and_axes():
    sinks = normal(3, HEADS, GROUP)
    made = ours(causal, scaling_factor=0.5, logits_soft_cap=2.0, attn_sink=sinks)
    agree(made, plain(q.array, k.array, v.array, j <= i, 0.5, 2.0, sinks.array))
    order = (AT, GROUP, BATCH, SIZE, HEADS)
    turned = ours(causal, q.rearrange(order), k.rearrange((KEYS, SIZE, HEADS, BATCH)), v)
    assert turned.axes == (AT, GROUP, BATCH, HEADS, SIZE)
    agree(turned.rearrange(q.axes), ours(causal).array)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    assert ours(causal, *half).dtype == ours(causal, *half, attention_dtype=jnp.float32).dtype == jnp.bfloat16
    agree(ours(causal, dropout=0.1, inference=True), ours(causal).array)


def test_segments_under_jit():
    """Where ids can't be read, a query sees the last run of its id."""
    back = jnp.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 2, 2, 2])

    def attend(x):
        return ours(replace(causal, segment_ids=(Named(x, (AT,)),) * 2)).array

    with pytest.raises(ValueError, match="ids has 0 in two places"):
        attend(back)
    back = np.asarray(back)
    seen = (back[:, None] == back) & (j <= i) & ~((back == 0) & (j < 6))
    np.testing.assert_allclose(jax.jit(attend)(jnp.asarray(back)), plain(q.array, k.array, v.array, seen), atol=2e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": q}, NotImplementedError, "attention has no bias; set attn_backend to 'vanilla' or 'jax_flash'"),
        ({"dropout": 0.1}, NotImplementedError, "no dropout; set the model's attn_pdrop to 0, or set attn_backend to"),
        ({"mask": q}, NotImplementedError, "the mask is an array; pass an AttentionMask of ranges, or set"),
        ({"mask": AttentionMask(explicit_mask=q)}, NotImplementedError, "explicit_mask, which onchip can't read as ra"),
        ({"mask": replace(causal, segment_ids=(Named(jnp.zeros((3, 12), int), (Axis("other", 3), AT)),) * 2)},
         ValueError, "Axis.name='other', size=3. is an axis of a mask, a sink or a value, but not"),
        ({"attn_sink": normal(3, BATCH)}, ValueError, "Axis.name='batch', size=2. is an axis of a mask"),
        ({"v": normal(0, BATCH, HEADS, Axis("more", 2), KEYS, SIZE)}, ValueError, "value must have one axis beside"),
        ({"logits_soft_cap": 0.0}, ValueError, "softcap must be above 0"),
    ],
)  # fmt: skip
def test_refused(options, error, message):
    with pytest.raises(error, match=message):
        ours(**{"mask": causal} | options)


def test_install(stand_in, monkeypatch):
    def theirs(*given, **named): ...

    theirs.__module__, theirs.__signature__ = integration.__name__, None
    monkeypatch.setattr(integration.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="Levanter isn't installed; pip install marin-levanter"):
        install_attention()
    monkeypatch.setattr(integration.importlib.util, "find_spec", lambda name: name)
    module = stand_in("levanter.layers.attention")
    with pytest.raises(RuntimeError, match=r"Levanter has no levanter\.layers\.attention._try_te_att"):
        install_attention()
    theirs.__module__, theirs.__signature__ = module.__name__, integration.inspect.signature(named_attention)
    module._try_te_attention = theirs
    for _ in range(2):
        assert "'nvte', the default on GPUs, runs through onchip, which" in str(install_attention())
        assert module._try_te_attention is named_attention
    for _ in range(2):
        uninstall_attention()
        assert module._try_te_attention is theirs
    module._try_te_attention = lambda q: q
    module._try_te_attention.__module__ = module.__name__
    with pytest.raises(RuntimeError, match=r"of Levanter takes \(q\), but onchip knows it with \(QPos, KPos, Key,"):
        install_attention()
