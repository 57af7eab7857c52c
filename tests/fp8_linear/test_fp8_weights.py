"""The cache of quantised weights, and the module that lives by it."""

import copy
import gc
import weakref

import pytest
import torch
from fp8_common import oracle, small_problem

from onchip.fp8 import torch_quantize
from onchip.ops.fp8_linear import torch_weights
from onchip.torch import Fp8Linear, convert_linears, forget_weight, fp8_linear


@pytest.fixture
def quantised(monkeypatch):
    """What is quantised of weights: (rows, transposed) for each time."""
    times = []
    right = torch_quantize.quantize_weight

    def counted(*arguments, **wanted):
        times.append((wanted["rows"], wanted["transposed"]))
        return right(*arguments, **wanted)

    monkeypatch.setattr(torch_quantize, "quantize_weight", counted)
    return times


def step(x, w, **options):
    out = fp8_linear(x, w, **options)
    out.backward(torch.ones_like(out))
    return out.detach()


def assert_fresh(x, w):
    """The op uses what `w` is now."""
    made = fp8_linear(x, w).detach()
    forget_weight(w)
    assert torch.equal(made, fp8_linear(x, w))


def test_a_weight_is_quantised_once_for_all_micro_batches(quantised):
    x, w, _ = small_problem()
    for _ in range(3):
        step(x, w)
    assert quantised == [(True, True)]


def test_without_gradients_only_one_copy_is_made(quantised):
    x, w, _ = small_problem()
    with torch.no_grad():
        fp8_linear(x, w)
        fp8_linear(x, w)
    assert quantised == [(True, False)]
    step(x, w)
    assert quantised == [(True, False), (False, True)]


def test_no_cache_quantises_what_each_pass_needs(quantised):
    x, w, _ = small_problem()
    for _ in range(2):
        step(x, w, cache_weight=False)
    assert quantised == [(True, False), (False, True)] * 2
    assert w not in torch_weights._CACHE.entries


def change_in_place(w):
    with torch.no_grad():
        w.mul_(-2)


def swap_data(w):
    w.data = w.data * -2


def swap_data_into_the_same_memory(w):
    """The old storage is gone and the new one may have its address: only a reference to it can tell."""
    values = w.data.double() * -2
    for _ in range(8):
        w.data = torch.empty(0)
        w.data = torch.empty(values.shape, dtype=torch.float32)
        w.data.copy_(values)


def load(w):
    module = torch.nn.ParameterDict({"w": w})
    module.load_state_dict({"w": w.detach() * -2})


def optimizer(w, make=torch.optim.AdamW, **options):
    w.grad = torch.ones_like(w)
    make([w], lr=0.5, **options).step()


class PastTheCounter(torch.optim.Optimizer):
    """Changes parameters as a fused kernel does, without PyTorch noticing."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.numpy()[:] *= -2


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        swap_data,
        swap_data_into_the_same_memory,
        load,
        optimizer,
        lambda w: optimizer(w, torch.optim.SGD, foreach=True),
        lambda w: optimizer(w, fused=True),
        lambda w: optimizer(w, PastTheCounter),
    ],
    ids=["in place", ".data", ".data of the same memory", "load_state_dict", "AdamW", "foreach", "fused", "past it"],
)
def test_a_change_is_seen(change, quantised):
    x, w, _ = small_problem()
    w = torch.nn.Parameter(w.detach())
    old = step(x, w)
    change(w)
    assert not torch.equal(fp8_linear(x, w), old)
    assert len(quantised) == 2
    assert_fresh(x, w)


def test_the_version_of_a_scale_is_its_own(quantised):
    x, w, _ = small_problem()
    for scale in ("float32", "power_of_two", "float32"):
        assert torch.equal(fp8_linear(x, w, scale=scale), fp8_linear(x, w, scale=scale, cache_weight=False))


def test_a_frozen_weight_stays_through_steps_of_others(quantised):
    x, w, _ = small_problem()
    w.requires_grad_(False)
    step(x, w)
    optimizer(torch.nn.Parameter(torch.ones(3)))
    step(x, w)
    assert len(quantised) == 1


def test_writing_past_all_bookkeeping_needs_a_word():
    x, w, _ = small_problem()
    old = step(x, w)
    w.data.mul_(-2)
    forget_weight(w)
    forget_weight(w)  # nothing to drop
    assert not torch.equal(fp8_linear(x, w), old)


def test_copies_go_with_their_weight():
    x, w, _ = small_problem()
    step(x, w)
    copies = weakref.ref(torch_weights._CACHE.entries[w].rows.data)
    del w
    x.grad = None
    gc.collect()
    assert copies() is None


def test_views_and_inference_tensors():
    x, w, _ = small_problem()
    with torch.inference_mode():
        frozen = w.detach().clone()
        assert torch.equal(fp8_linear(x, frozen), fp8_linear(x, w))
    both = torch.randn(272, 144)
    for half in both.chunk(2):
        assert torch.equal(fp8_linear(x, half), fp8_linear(x, half.clone()))


# --------------------------------------------------------------------------------------------------------------- module


def test_the_module_is_the_function():
    layer = Fp8Linear(144, 136, grad_dtype="e5m2", scale="power_of_two")
    x, _, _ = small_problem()
    options = {"grad_dtype": "e5m2", "scale": "power_of_two"}
    out = layer(x)
    g = torch.randn_like(out)
    out.backward(g)
    expected = oracle(x, layer.weight, layer.bias, g, **options)
    torch.testing.assert_close(layer.weight.grad, expected.grad_weight, rtol=1e-4, atol=1e-4)
    assert torch.equal(out, fp8_linear(x, layer.weight, layer.bias, **options))
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


def test_a_compiled_layer_is_not_what_runs_in_its_place(quantised):
    linear = torch.nn.Linear(32, 32)
    linear.compile(backend="eager")
    Fp8Linear.from_linear(linear)(torch.randn(2, 32))
    assert len(quantised) == 1


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


def test_another_weight_drops_the_old_ones_copies():
    layer = Fp8Linear(144, 136)
    x = torch.randn(3, 144)
    layer(x)
    old = layer.weight
    assert old in torch_weights._CACHE.entries
    layer.weight = torch.nn.Parameter(torch.zeros(136, 144))
    assert old not in torch_weights._CACHE.entries
    assert torch.equal(layer(x), layer.bias.expand(3, 136))


@pytest.fixture(params=[False, True], ids=["data", "swapped"])
def swap(request):
    """Whether PyTorch swaps parameters for new ones instead of giving them other data."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize(
    "change",
    [lambda layer: layer.double(), lambda layer: layer.load_state_dict(torch.nn.Linear(144, 136).state_dict())],
    ids=["to", "load_state_dict"],
)
def test_conversion_and_loading_drop_the_copies(change, swap):
    layer = Fp8Linear(144, 136)
    x = torch.randn(3, 144)
    layer(x)
    change(layer)
    assert layer.weight not in torch_weights._CACHE.entries
    layer.float()
    assert torch.equal(layer(x), fp8_linear(x, layer.weight, layer.bias, cache_weight=False))


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
