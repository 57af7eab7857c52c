"""torchtitan's integration without torchtitan: refusals, what is converted, and results that need no stack."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from integrations.stand_ins import TitanExperts, TitanLinear, TitanVarlen, TitanVarlenMetadata, refused


def test_torchtitan_refuses(torchtitan, monkeypatch):
    Config = torchtitan.LinearCrossEntropyLoss.Config
    loss = torchtitan.LinearCrossEntropyLoss(Config())
    refused(RuntimeError, r"call set_lm_head\(model.lm_head\)", loss, torch.ones(2, 3, 4), torch.ones(2, 3).long())
    refused(TypeError, "lm_head is a Sequential, .* leave lm_head out of LoRA", loss.set_lm_head, nn.Sequential())
    head = nn.Linear(4, 7, bias=False)
    head.forward = refused
    refused(TypeError, "lm_head has a forward of its own, by integrations.stand_ins", loss.set_lm_head, head)
    head = nn.Linear(4, 7, bias=False)
    loss.set_lm_head(head)
    assert head(torch.ones(2, 4)).shape == (2, 7)
    refused(
        ValueError, r"hidden states are \[2, 4\] and labels are \[2\]", loss, torch.ones(2, 4), torch.ones(2).long()
    )
    refused(ValueError, r"must be \[B, L, D\] and", loss, torch.ones(2, 3, 4), torch.ones(2, 5).long())
    monkeypatch.setattr(torchtitan.spmd, "is_type_checking", lambda: True)
    refused(RuntimeError, "spmd_typechecking to False", loss, torch.ones(2, 3, 4), torch.ones(2, 3).long())
    head.out_features = 14  # the weight is half of what the layer says
    loss._labels = torch.zeros(2, dtype=torch.int64)
    refused(RuntimeError, r"lm_head is \[7, 4\] of \[14, 4\], but .* no mesh .* 'tp'", head, torch.ones(2, 4))
    fp8 = torchtitan.TitanFp8Linear(torchtitan.TitanFp8Linear.Config(in_features=32, out_features=16))
    fp8.out_features = 32
    refused(RuntimeError, "sharded here.*tensor_parallel_degree to 1", fp8, torch.ones(2, 32))
    half = torch.ones(1, dtype=torch.bfloat16)
    refused(RuntimeError, "casts the loss to bfloat16; leave output_dtype", torchtitan._divided, half, None, None)
    for options, error, message in (
        ({"scratch_bytes": "1GiBB"}, ValueError, "scratch_bytes"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing"),
        ({"backend": "cuda"}, ValueError, "backend"),
    ):
        refused(error, message, torchtitan.LinearCrossEntropyLoss, Config(**options))


class TitanModel(SimpleNamespace):
    """A model's config: fields that are configs, or lists of them."""

    def traverse(self, kind):
        for name, value in vars(self).items():
            parent, places = (value, range(len(value))) if isinstance(value, list) else (self, [name])
            for place in places:
                yield name, value[place] if parent is value else value, parent, place


def test_torchtitan_converts_linears(torchtitan):
    class Own(TitanLinear.Config):
        pass

    size = {"in_features": 32, "out_features": 64}
    converter = torchtitan.Fp8LinearConverter(torchtitan.Fp8LinearConverter.Config(grad_dtype="e5m2"))
    model = TitanModel(wq=TitanLinear.Config(**size, bias=True), lm_head=TitanLinear.Config(**size), lora=Own(**size))
    small = TitanLinear.Config(in_features=24, out_features=64)
    model.small = small
    assert converter.convert(model) is model
    assert (model.wq.bias, model.wq.grad_dtype, model.wq.out_features) == (True, "e5m2", 64)
    assert type(model.wq) is torchtitan.TitanFp8Linear.Config
    assert type(torchtitan.TitanFp8Linear(model.wq)(torch.ones(16, 32))) is torch.Tensor
    assert (type(model.lm_head), type(model.lora), model.small) == (TitanLinear.Config, Own, small)
    refused(
        ValueError, r"no Linear .* filter_fqns is \['lm_head', 'router'\]", converter.convert, TitanModel(small=small)
    )
    wrong = torchtitan.Fp8LinearConverter.Config(scale="int8")
    refused(ValueError, "scale", torchtitan.Fp8LinearConverter, wrong)


def titan_attention(torchtitan, rows_begin=True, **options):
    """An attention, q, k and v [2, 12, heads, 8], torchtitan's mask of their documents, and the pairs that it shows."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, size, requires_grad=True) for heads, size in ((4, 8), (2, 8), (2, 6)))
    begins = [0, 5, 12, 15]  # of 5 and 7 tokens in a row, 3 and 9 in the other
    begins = begins if rows_begin else [5, 15]
    ends = torch.tensor([*begins, 24], dtype=torch.int32)
    ids = (torch.arange(24) >= ends[:, None]).sum(0).reshape(2, 12)
    same = ids[:, :, None] == ids[:, None]
    module = torchtitan.OnchipAttention(torchtitan.OnchipAttention.Config(**options))
    return module, (q, k, v), TitanVarlenMetadata(ends, ends.clone()), same


@pytest.mark.parametrize("rows_begin", [True, False])
@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (2, 1), (-1, -1)])
def test_torchtitan_attention(torchtitan, window, rows_begin):
    """A row may also begin in the middle of a document."""
    module, given, masks, same = titan_attention(torchtitan, rows_begin, window_size=window)
    back = torch.arange(12)[:, None] - torch.arange(12)
    left, right = (12 if side < 0 else side for side in window)
    seen = (same & (back <= left) & (back >= -right))[:, None]
    made = module(*given, attention_masks=masks, scale=0.3, enable_gqa=True)
    q, k, v = (x.transpose(1, 2) for x in given)
    expected = F.scaled_dot_product_attention(q, k, v, seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(made, expected)
    weights = torch.randn(made.shape)
    for x, y in zip(*(torch.autograd.grad((out * weights).sum(), given) for out in (made, expected)), strict=True):
        torch.testing.assert_close(x, y)


def test_torchtitan_attention_with_sinks(torchtitan):
    """As gpt-oss rescales what it gets."""
    module, given, masks, same = titan_attention(torchtitan, window_size=(-1, -1))
    sinks = torch.randn(4)
    made = module(
        *given, attention_masks=masks, out_transform=lambda out, lse: out * (lse - sinks).sigmoid()[..., None]
    )
    q, k, v = (x.transpose(1, 2).repeat_interleave(4 // x.shape[2], 1) for x in given)
    scores = torch.where(same[:, None], q @ k.mT * 8**-0.5, -torch.inf)
    p = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 12, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(made, (p @ v).transpose(1, 2))


def test_torchtitan_attention_refuses(torchtitan, monkeypatch):
    module, given, masks, _ = titan_attention(torchtitan)
    with pytest.raises(TypeError, match="attention has no score_mod; leave AttentionConverter out"):
        module(*given, attention_masks=masks, score_mod=abs)
    for wrong in (None, object()):
        with pytest.raises(
            TypeError, match=f"a {type(wrong).__name__}, and must be a VarlenMetadata; build the model wi"
        ):
            module(*given, attention_masks=wrong)
    q, k, v = given
    with pytest.raises(
        ValueError, match=r"queries are \[2, 3, 4, 8\] and keys \[2, 12, 2, 8\], and must be the same to"
    ):
        module(q[:, :3], k, v, attention_masks=masks)
    monkeypatch.setattr(torchtitan.spmd, "is_type_checking", lambda: True)
    with pytest.raises(RuntimeError, match="attention has no SPMD types; set debug"):
        module(*given, attention_masks=masks)


def test_torchtitan_converts_attention(torchtitan):
    class Own(TitanVarlen.Config):
        pass

    converter = torchtitan.AttentionConverter(torchtitan.AttentionConverter.Config(backend="plain"))
    model = TitanModel(layers=[TitanVarlen.Config(window_size=(7, 0)), Own()], last=TitanVarlen.Config())
    assert converter.convert(model) is model
    assert (model.layers[0].window_size, model.layers[0].backend) == ((7, 0), "plain")
    assert type(model.last) is torchtitan.OnchipAttention.Config
    assert type(model.layers[1]) is Own
    refused(ValueError, "is left to convert; build it with attn_backend='varlen'", converter.convert, TitanModel())
    wrong = torchtitan.AttentionConverter.Config(backend="flex")
    refused(ValueError, "backend", torchtitan.AttentionConverter, wrong)


def test_torchtitan_converts_experts(torchtitan, monkeypatch):
    class Capped(TitanExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(TitanExperts.Config):
            limit: float = 7.0

    class Quantized(Capped):
        @dataclass(kw_only=True, slots=True)
        class Config(Capped.Config):
            pass

        def _grouped_mm(self, *, A, B_t, offs):
            raise AssertionError

    class Float8(Capped):
        @dataclass(kw_only=True, slots=True)
        class Config(Capped.Config):
            pass

        __module__ = "torchtitan.components.quantization.float8"

    size = {"dim": 32, "hidden_dim": 16, "num_experts": 4}
    converter = torchtitan.GroupedMatmulConverter(torchtitan.GroupedMatmulConverter.Config(backend="plain"))
    kept = [Quantized.Config(**size), Float8.Config(**size)]
    model = TitanModel(layers=[TitanExperts.Config(**size), *kept], last=Capped.Config(**size, limit=3.0))
    assert converter.convert(model) is model
    assert model.layers[1:] == kept
    assert (model.last.limit, model.last.onchip_backend) == (3.0, "plain")
    assert type(model.last)._owner.__name__ == "OnchipCapped"
    assert issubclass(type(model.last)._owner, Capped)

    made = []
    x = torch.randn(30, 32, requires_grad=True)
    for config in (TitanExperts.Config(**size), model.layers[0]):
        torch.manual_seed(1)
        experts = type(config)._owner(config)
        y = experts(x, torch.tensor([11, 0, 12, 7]))
        made.append((y, *torch.autograd.grad(y.square().sum(), (x, *experts.parameters()))))
    # In bfloat16: what is rounded may go either way.
    for a, b in zip(*made, strict=True):
        assert (a - b).norm() < 5e-3 * b.norm()
    # torchtitan's dispatchers may leave rows at the end that are no expert's.
    y = experts(torch.cat([x, torch.full((5, 32), torch.nan)]), torch.tensor([11, 0, 12, 7]))
    assert torch.equal(y[:30], made[1][0])
    assert not y[30:].any()

    alone = converter.convert(TitanModel(one=TitanExperts.Config(**size))).one
    assert type(alone) is type(model.layers[0])  # one class for each
    refused(ValueError, "no GroupedExperts of the model are left to convert", converter.convert, TitanModel(one=alone))
    wrong = torchtitan.GroupedMatmulConverter.Config(backend="cuda")
    refused(ValueError, "backend", torchtitan.GroupedMatmulConverter, wrong)
    monkeypatch.setattr(torchtitan.spmd, "is_type_checking", lambda: True)
    refused(RuntimeError, "spmd_typechecking to False", experts, x, torch.tensor([11, 0, 12, 7]))
