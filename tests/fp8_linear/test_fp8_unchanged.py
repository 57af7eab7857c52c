"""The weight that a call computes with: the present one, or one that was quantised before, by quantize_weight or by
weights_unchanged for the layers of a model.
"""

import copy
import pickle
import threading
from functools import partial

import pytest
import torch
from fp8_common import assert_equal, small_problem
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from onchip.fp8 import torch_quantize
from onchip.ops.fp8_linear import torch_module
from onchip.torch import Fp8Linear, fp8_linear, linear_cross_entropy, quantize_weight, weights_unchanged

CHANGED = r"fp8_linear: weight changed after it was quantised; quantise it again"


@pytest.fixture
def quantised(monkeypatch):
    """For each time that a weight was quantised, whether it was transposed too."""
    times = []
    right = torch_quantize.quantize

    def counted(*arguments, by_block=False, turned=True, **wanted):
        if by_block:
            times.append(turned)
        return right(*arguments, by_block=by_block, turned=turned, **wanted)

    monkeypatch.setattr(torch_quantize, "quantize", counted)
    return times


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """No copies are checked that nobody asked to check."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(torch_module, "_where", lambda t: (torch_module._capturing(), 0))


def make_model(kind="plain"):
    layers = [Fp8Linear(144, 136), Fp8Linear(136, 144, scale="power_of_two", bias=False)]
    if kind == "weight_norm":
        layers = [parametrizations.weight_norm(layer) for layer in layers]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])


def step(model, x, run=None):
    """The output, x's gradient and those of the parameters."""
    x = x.detach().requires_grad_()
    out = model(x) if run is None else run(model, x)
    leaves = [x, *(model.parameters() if isinstance(model, torch.nn.Module) else ())]
    for leaf in leaves:
        leaf.grad = None
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


# ------------------------------------------------------------------------------------------------------- in each call


@pytest.mark.parametrize("x_needs", [True, False])
def test_a_step_quantises_its_weight_once(x_needs, quantised):
    x, w, _ = small_problem()
    for _ in range(3):
        fp8_linear(x.requires_grad_(x_needs), w).sum().backward()
    with torch.no_grad():
        fp8_linear(x, w)
    assert quantised == [x_needs] * 3 + [False]


@pytest.mark.parametrize(
    "change",
    [lambda w: w.data.mul_(0.9).add_(1), lambda w: w.detach().numpy().__imul__(-2)],
    ids=["data", "numpy"],
)
def test_a_change_that_nothing_counts(change):
    x, w, _ = small_problem()
    w = torch.nn.Parameter(w.detach())
    for _ in range(2):
        fp8_linear(x, w)
        change(w)
        made, right = (step(partial(fp8_linear, weight=v), x) for v in (w, w.detach().clone()))
        assert_equal(made, right)


# ----------------------------------------------------------------------------------- quantize_weight: what is checked


@pytest.mark.parametrize(
    ("part", "compiled"),
    [*((part, False) for part in ("rows", "row_scales", "transposed", "transposed_scales", "weight")), ("rows", True)],
)
def test_values_are_checked(part, compiled):
    """On the CPU always; the check is in the operator, so that compiled code has it too."""
    x, w, _ = small_problem()
    quantized = quantize_weight(w.detach())
    of = getattr(quantized, part)
    quantized = quantized._replace(**{part: (of.float() * -1).to(of.dtype)})
    call = torch.compile(fp8_linear, backend="aot_eager") if compiled else fp8_linear
    with pytest.raises(RuntimeError, match=CHANGED):
        call(x, quantized)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_on_a_gpu_values_are_checked_where_that_is_asked_for(quantised):
    x, w, _ = small_problem()
    quantized = quantize_weight(w)
    with torch.no_grad():
        w.mul_(2)
    quantised.clear()
    fp8_linear(x, quantized)
    assert quantised == []
    with pytest.raises(RuntimeError, match=CHANGED):
        fp8_linear(x, quantized, check_inputs=True)


def test_linear_cross_entropy_takes_one():
    h, w, targets = torch.randn(24, 144, requires_grad=True), small_problem()[1], torch.arange(24)
    quantized = quantize_weight(w)
    losses = [linear_cross_entropy(h, given, targets, precision="fp8") for given in (quantized, w)]
    assert torch.equal(*losses)
    assert_equal(*(torch.autograd.grad(loss, (h, w)) for loss in losses))
    with pytest.raises(TypeError, match="weight is a QuantizedWeight, which only precision='fp8' takes"):
        linear_cross_entropy(h, quantized, targets)
    with pytest.raises(ValueError, match="weight was quantised without gradients but hidden needs one"):
        linear_cross_entropy(h, quantized._replace(transposed=None), targets, precision="fp8")
    with pytest.raises(ValueError, match="weight was quantised with scale='power_of_two' but scale is 'float32'"):
        linear_cross_entropy(h, quantize_weight(w, scale="power_of_two"), targets, precision="fp8")
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: weight changed after it was quantised"):
        linear_cross_entropy(h, quantized, targets, precision="fp8")


# --------------------------------------------------------------------------------------------------- weights_unchanged


def checkpointed(reentrant):
    return lambda model, x: checkpoint(model, x, use_reentrant=reentrant)


def compiled(model, x):
    return torch.compile(model, backend="aot_eager")(x)


@pytest.mark.parametrize("kind", ["plain", "weight_norm"])
@pytest.mark.parametrize(
    "run", [None, checkpointed(True), checkpointed(False), compiled], ids=["plain", "reentrant", "other", "compiled"]
)
def test_the_same_bits_inside(run, kind):
    model, (x, _, _) = make_model(kind), small_problem()
    expected = step(model, x, run)
    with weights_unchanged(model) as names:
        assert names == ["0", "2"]
        for _ in range(2):
            assert_equal(step(model, x, run), expected)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    assert_equal(step(model, x, run), step(copy.deepcopy(model), x))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_each_weight_is_quantised_once(quantised):
    model, (x, _, _) = make_model(), small_problem()
    with weights_unchanged(model):
        for run in (None, None, checkpointed(True), checkpointed(False)):
            step(model, x, run)
        assert len(quantised) == 2
    step(model, x)
    assert len(quantised) == 4
    with torch.no_grad(), weights_unchanged(model[0]) as names:
        assert names == [""]
        assert torch.equal(model[0](x), model[0](x))
    assert len(quantised) == 5


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("how", ["left", "raised", "nested"])
def test_copies_go_with_the_context(how, quantised):
    """And a context inside of another leaves that one's."""
    model, (x, _, _) = make_model(), small_problem()
    if how == "raised":
        with pytest.raises(KeyError), weights_unchanged(model):
            raise KeyError
    else:
        with weights_unchanged(model):
            if how == "nested":
                with torch.no_grad():
                    model[0].weight.mul_(2)
                with weights_unchanged(model[0]):
                    step(model, x)
                with pytest.raises(RuntimeError, match=r"weights_unchanged: the weight of layer '0' changed inside"):
                    model(x)
    quantised.clear()
    step(model, x)
    assert len(quantised) == 2
    assert torch_module._OPEN == []


def replaced(layer):
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("change", "seen_by"),
    [
        (lambda layer: layer.weight.data.mul_(2), "values"),
        (lambda layer: layer.weight.mul_(2), "version"),
        (replaced, "version"),
    ],
    ids=["data", "in place", "replaced"],
)
def test_a_weight_that_changes_inside(change, seen_by, gpu, request):
    """Nothing but its values shows what is written to `.data`; on a GPU they are read where that is asked for."""
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    model, (x, _, _) = make_model(), small_problem()
    message = CHANGED if seen_by == "values" else r"weights_unchanged: the weight of layer '2' changed inside"
    with weights_unchanged(model, check_inputs=gpu), torch.no_grad():
        model(x)
        change(model[2])
        with pytest.raises(RuntimeError, match=message):
            model(x)
    model(x)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_no_part_of_a_layer(twin):
    layer, (x, _, _) = Fp8Linear(144, 136), small_problem()
    state, size = list(layer.state_dict()), len(pickle.dumps(layer))
    with weights_unchanged(layer):
        other = twin(layer)
        assert (list(layer.state_dict()), len(pickle.dumps(layer))) == (state, size)
        other.weight = torch.nn.Parameter(-layer.weight.detach())
        assert torch.equal(other(x), fp8_linear(x, other.weight, other.bias))


def test_weights_that_are_not_there_are_left_alone():
    model = make_model()
    model[0].to("meta")
    model[2].weight = torch.nn.Parameter(torch.empty(0))
    with weights_unchanged(model) as names:
        assert names == []
        assert model[0](torch.empty(3, 144, device="meta")).shape == (3, 136)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("captured", [True, False])
def test_copies_are_used_in_the_capture_that_they_were_made_in_alone(captured, quantised, monkeypatch):
    model, (x, _, _) = make_model(), small_problem()
    now = [captured]
    monkeypatch.setattr(torch_module, "_capturing", lambda: now[0])
    context = weights_unchanged(model)
    context.__enter__()
    for now[0], times in ((captured, 2), (not captured, 4), (captured, 4)):
        model(x)
        assert len(quantised) == times
    now[0] = False
    if captured:
        with pytest.raises(RuntimeError, match="entered during the capture of a CUDA graph and left after it"):
            context.__exit__(None, None, None)
    else:
        context.__exit__(None, None, None)
    model(x)
    assert len(quantised) == 6


def test_four_threads():
    """With a context each that overlap, on a model that they share."""
    model, (x, _, _) = make_model(), small_problem()
    with torch.no_grad():
        expected, wrong = model(x), []

        def work():
            for _ in range(10):
                with weights_unchanged(model):
                    wrong.append(not torch.equal(model(x), expected))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == [False] * 40
    assert torch_module._OPEN == []
