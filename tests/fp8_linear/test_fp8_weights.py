"""Each call computes with what its weight is at that time, however it became that; and the module."""

import copy

import pytest
import torch
from fp8_common import oracle, small_problem
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from onchip.fp8 import torch_quantize
from onchip.torch import Fp8Linear, convert_linears, fp8_linear, linear_cross_entropy

WEIGHTS = torch.randn(3, 136, 144, generator=torch.Generator().manual_seed(1))


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


def step(x, w, layer=fp8_linear):
    """The output, and x's gradient."""
    x = x.detach().requires_grad_()
    out = layer(x, w)
    out.square().sum().backward()
    return [out.detach(), x.grad]


def assert_equal(made, expected):
    assert all(torch.equal(p, q) for p, q in zip(made, expected, strict=True))


def assert_right(x, w, made=None):
    """The same as with a tensor that has never been seen."""
    assert_equal(made or step(x, w), step(x, w.detach().clone()))


@pytest.mark.parametrize("x_needs", [True, False])
def test_a_step_quantises_its_weight_once(x_needs, quantised):
    x, w, _ = small_problem()
    for _ in range(3):
        fp8_linear(x.requires_grad_(x_needs), w).sum().backward()
    with torch.no_grad():
        fp8_linear(x, w)
    assert quantised == [(True, x_needs)] * 3 + [(True, False)]


def swap_with_an_average(w):
    mine = w.data
    w.data = mine * 0.5
    mine.lerp_(w.data, -3)
    w.data = mine


def through_numpy(w):
    w.detach().numpy()[:] *= -2


def from_a_vector(w):
    for factor in (1, -2):
        vector_to_parameters(parameters_to_vector([w]).detach() * factor, [w])
        step(small_problem()[0], w)
    w.data.mul_(-3)


def shared_memory(w):
    w.data.share_memory_()
    torch.from_numpy(w.detach().numpy()).mul_(-2)


def add_to_data(w):
    w.data += 1


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.data.mul_(0.9).add_(1),
        add_to_data,
        from_a_vector,
        swap_with_an_average,
        shared_memory,
        through_numpy,
    ],
    ids=["data", "+=", "vector", "average", "shared memory", "numpy"],
)
def test_a_change_that_nothing_counts(change):
    x, w, _ = small_problem()
    w = torch.nn.Parameter(w.detach())
    for _ in range(2):
        step(x, w)
        change(w)
        assert_right(x, w)


def test_compiled():
    """Inductor gives one buffer after the other the same memory, and the same tensor in Python; and what a compiled
    function updates has the version of after the update from its start.
    """
    x, w, _ = small_problem()
    weights, targets = WEIGHTS.clone().requires_grad_().unbind(), torch.arange(24)
    normed = [parametrizations.weight_norm(Fp8Linear(144, 136)) for _ in range(3)]

    def cast(x, w):
        return fp8_linear(x, w.bfloat16())

    def model(x, weights, w):
        outs = [fp8_linear(x, w)]
        if not torch.is_grad_enabled():
            w.lerp_(weights[0], 2.0)
        outs += [cast(x, v) for v in weights]
        outs += [checkpoint(cast, x, v.tanh(), use_reentrant=False) for v in weights]
        outs += [layer(x) for layer in normed]
        outs += [linear_cross_entropy(x.view(24, 144), v * 2, targets, precision="fp8") for v in weights]
        return outs

    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        other = w.clone()
        assert_equal(compiled(x, weights, w), model(x, [v.clone() for v in weights], other))
    assert_equal(step(x, w), step(x, other))
    leaves = (x, w, *weights, *(p for layer in normed for p in layer.parameters()))
    made, right = compiled(x, weights, w), model(x, weights, w)
    assert_equal(made, right)
    both = [torch.autograd.grad(sum(out.square().sum() for out in outs), leaves) for outs in (made, right)]
    for p, q in zip(*both, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-2 * float(q.norm()) / q.numel() ** 0.5)  # sums in bfloat16


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_with_casts_and_checkpointing(reentrant):
    """A cast weight is gone before backward, and another one has its memory."""
    x, _, _ = small_problem()

    def train(run):
        weights = [w.requires_grad_() for w in WEIGHTS[:, :, :136].clone()]
        for _ in range(2):
            h = x[..., :136].detach().requires_grad_()
            for w in weights:
                h = run(lambda h, w: fp8_linear(h, w.bfloat16()).tanh(), h, w)
            h.square().sum().backward()
            with torch.no_grad():
                for w in weights:
                    w -= w.grad / w.grad.norm()
                    w.grad = None
        return weights

    made = train(lambda f, h, w: checkpoint(f, h, w, use_reentrant=reentrant))
    assert_equal(made, train(lambda f, h, w: f(h, w)))


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
