"""The module, and the conversion of a model's linear layers to it."""

import copy

import pytest
import torch
from fp8_common import assert_the_oracles, oracle, small_problem

from onchip.torch import Fp8Linear, convert_linears, fp8_linear


def test_the_module_is_the_function():
    options = {"grad_dtype": "e5m2", "scale": "power_of_two"}
    layer, (x, _, _) = Fp8Linear(144, 136, **options), small_problem()
    assert_the_oracles(x, layer.weight, layer.bias, layer=lambda x, *_, **__: layer(x), **options)
    assert repr(layer) == (
        "Fp8Linear(in_features=144, out_features=136, bias=True, grad_dtype='e5m2', scale='power_of_two')"
    )


def test_from_linear_shares_everything():
    linear = torch.nn.Linear(144, 136, bias=False).eval()
    seen = []
    handle = linear.register_forward_hook(lambda *_: seen.append(1))
    layer = Fp8Linear.from_linear(linear, backend="dequantize")
    assert layer.weight is linear.weight
    assert layer.bias is None
    assert not layer.training
    layer(torch.randn(3, 144))
    handle.remove()
    layer(torch.randn(3, 144))
    assert seen == [1]
    assert type(linear) is torch.nn.Linear
    linear.weight = torch.nn.Parameter(torch.zeros(136, 144))
    assert layer.weight.any()
    with pytest.raises(TypeError, match=r"it takes a torch\.nn\.Linear; got Fp8Linear"):
        Fp8Linear.from_linear(layer)


def test_state_dicts_are_nn_linears():
    linear, layer = torch.nn.Linear(144, 136, dtype=torch.bfloat16), Fp8Linear(144, 136, dtype=torch.bfloat16)
    x = torch.randn(3, 144)
    layer(x)
    layer.load_state_dict(linear.state_dict())
    assert layer.state_dict().keys() == linear.state_dict().keys()
    assert all(t.dtype == torch.bfloat16 for t in layer.state_dict().values())
    assert torch.equal(layer(x), Fp8Linear.from_linear(linear)(x))
    linear.load_state_dict(layer.state_dict())
    twin = copy.deepcopy(layer)
    assert twin.weight is not layer.weight
    assert torch.equal(twin(x), layer(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.tied = self.up
        self.attention = torch.nn.MultiheadAttention(32, 2)
        self.head = torch.nn.Linear(32, 10)


def test_convert_linears():
    model = torch.nn.ModuleList([Block(), Block()])
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    converted = convert_linears(model, lambda name, _: not name.endswith("head"), grad_dtype="e5m2")
    # The attention's projection is a subclass, whose weight is read without calling it.
    assert converted == [f"{i}.{name}" for i in (0, 1) for name in ("up", "down", "tied")]
    for block in model:
        assert type(block.up) is Fp8Linear
        assert block.tied is block.up
        assert block.up.options.grad_dtype == "e5m2"
        assert type(block.head) is torch.nn.Linear
    assert all(p is before[name] for name, p in model.named_parameters())
    x = torch.randn(4, 32)
    out = model[0].down(model[0].up(x))
    out.sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].down(model[0].up(x)), out)
    with pytest.raises(ValueError, match="model is a Linear itself"):
        convert_linears(torch.nn.Linear(3, 3))


def test_a_layer_with_a_forward_of_its_own_is_left_alone():
    """It would run in the place of Fp8Linear's."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    model[0].forward = model[0].forward
    assert convert_linears(model) == ["1"]
    with pytest.raises(TypeError, match=r"linear\.forward was replaced"):
        Fp8Linear.from_linear(model[0])


def test_a_compiled_layer_is_not_what_runs_in_its_place():
    linear, x = torch.nn.Linear(32, 32), torch.randn(2, 32)
    linear.compile(backend="eager")
    assert torch.equal(Fp8Linear.from_linear(linear)(x), fp8_linear(x, linear.weight, linear.bias))


def test_main_grad():
    layer = Fp8Linear(144, 136, dtype=torch.bfloat16, main_grad=True)
    x = torch.randn(16, 144, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
    with pytest.raises(ValueError, match=r"main_grad=True needs weight\.main_grad"):
        layer(x)
    layer.weight.main_grad = torch.zeros(136, 144)
    for _ in range(2):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    expected = 2 * oracle(x, layer.weight).grad_weight
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=1e-4, atol=1e-4)


def test_a_compiled_model_sees_each_step():
    model = torch.nn.Sequential(Fp8Linear(64, 128), torch.nn.GELU(), Fp8Linear(128, 32))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 64)
    for _ in range(2):
        out = compiled(x)
        assert torch.equal(out, model(x))
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
