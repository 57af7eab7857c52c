"""`LMHead` and `lm_loss` in one process: layers of every kind that a model may have as its head."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from heads import HIDDEN, VOCAB, capped, every_head, gather_when_called, inputs, linear, lora
from torch import nn

from onchip.torch import LMHead, linear_cross_entropy, lm_loss

OPTIONS = {"softcap": 3.0, "z_loss": 0.1}


def plain(head, hidden, labels, softcap=None):
    """The loss written out in float64: its value, and the gradients by hidden and by what the head trains."""
    head, hidden = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    head.zero_grad()
    logits = head(hidden)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss, hidden.grad, {name: p.grad for name, p in head.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")
@every_head
def test_every_head_has_the_loss_of_its_logits(make, softcap):
    """As it is, and twice, since some modules change when they are called."""
    head, (hidden, labels) = make(), inputs()
    for _ in range(2):
        expected, to_hidden, grads = plain(head, hidden, labels, softcap)
        head.zero_grad()
        hidden.grad = None
        loss = lm_loss(head, hidden, labels)
        loss.backward()
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=0)
        made = {name: p.grad.double() for name, p in head.named_parameters() if p.grad is not None}
        torch.testing.assert_close(
            made | {"hidden": hidden.grad.double()}, grads | {"hidden": to_hidden}, rtol=1e-4, atol=1e-7
        )


@pytest.mark.parametrize("make", [capped, lora], ids=["LMHead", "LoRA"])
def test_it_compiles_whole(make):
    torch._dynamo.reset()
    head, (hidden, labels) = make(), inputs()
    compiled = torch.compile(lambda h: lm_loss(head, h, labels), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden), lm_loss(head, hidden, labels))


def test_a_small_adapter_is_not_rounded_away():
    """In bfloat16 its sum with the weight would be the weight."""
    head = lora(adapters=1)
    with torch.no_grad():
        head.base_layer.weight.copy_(1 + torch.rand(VOCAB, HIDDEN))
        head.lora_B["adapter 0"].weight.mul_(1e-3)
    hidden, labels = inputs()
    hidden = hidden.detach().bfloat16()
    head.base_layer.bfloat16()
    expected, _, grads = plain(head, hidden, labels)
    loss = lm_loss(head, hidden, labels)
    loss.backward()
    without = lm_loss(head.base_layer, hidden, labels)
    assert abs(loss - expected) < 0.01 * abs(without - expected)
    for name, p in head.named_parameters():
        if p.requires_grad:
            assert p.grad.dtype == torch.float32
            assert (p.grad - grads[name]).norm() < 0.01 * grads[name].norm()


def test_an_lm_head_is_an_nn_linear_with_a_loss():
    layer, (hidden, labels) = linear(True), inputs()
    tied = nn.Embedding(VOCAB, HIDDEN)
    tied.weight = layer.weight
    head = LMHead.from_linear(layer.eval(), **OPTIONS)
    assert head.weight is tied.weight
    assert not head.training
    assert head.state_dict().keys() == layer.state_dict().keys()
    assert torch.equal(head(hidden), layer(hidden))
    expected = linear_cross_entropy(hidden, layer.weight, labels, layer.bias, shift=True, **OPTIONS)
    assert torch.equal(head(hidden, labels), expected)
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(other(hidden, labels), expected)
    more = {"softcap": None, "shift": False, "reduction": "none", "return_stats": True}
    loss, stats = head(hidden, labels, **more)
    same = linear_cross_entropy(hidden, layer.weight, labels, layer.bias, **OPTIONS | more)
    assert torch.equal(loss, same[0])
    assert torch.equal(stats.entropy, same[1].entropy)
    assert repr(head) == "LMHead(in_features=16, out_features=70, bias=True, shift=True, softcap=3.0, z_loss=0.1)"
    assert repr(LMHead(2, 3, False, shift=False)) == "LMHead(in_features=2, out_features=3, bias=False, shift=False)"


@pytest.mark.parametrize("strategy", ["stash", "recompute"])
def test_weights_that_are_gathered_when_a_module_is_called(strategy):
    hidden, labels = inputs()
    _, to_hidden, grads = plain(linear(), hidden, labels)
    head = LMHead.from_linear(linear(), strategy=strategy)
    gather_when_called(head)
    loss = lm_loss(head, hidden, labels)
    assert head.weight.numel() == 0
    loss.backward()
    torch.testing.assert_close(head.weight.grad.double(), grads["weight"], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(hidden.grad.double(), to_hidden, rtol=1e-4, atol=1e-7)
    gather_when_called(layer := linear())
    with pytest.raises(RuntimeError, match=r"lm_loss: Linear has hooks .* replace the head by LMHead"):
        lm_loss(layer, hidden, labels)
