"""Heads of models, and inputs for them."""

import peft
import pytest
import torch
from peft import LoraConfig
from torch import nn

from onchip.torch import LMHead

HIDDEN, VOCAB = 16, 70


def inputs():
    g = torch.Generator().manual_seed(0)
    hidden, labels = torch.randn(2, 9, HIDDEN, generator=g), torch.randint(VOCAB, (2, 9), generator=g)
    labels[1, 4:6] = -100
    return hidden.requires_grad_(), labels


def lora(base=None, adapters=1, train_base=False, **config):
    """PEFT's layer around a head, with adapters that matter."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"lm_head": base or nn.Linear(HIDDEN, VOCAB, bias=False)})
    names = [f"adapter {i}" for i in range(adapters)]
    for i, name in enumerate(names):
        of_one = LoraConfig(r=4 + i, lora_alpha=6, target_modules=["lm_head"], init_lora_weights=False, **config)
        model = peft.inject_adapter_in_model(of_one, model, name)
    head = model["lm_head"]
    head.set_adapter(names)
    head.base_layer.requires_grad_(train_base)
    return head


class EveryOther(nn.Module):
    """Dropout that float32 and float64 agree on."""

    def forward(self, x):
        return 2 * x * (torch.arange(x.shape[-1]) % 2)


def with_dropout():
    head = lora(lora_dropout=0.5)
    head.lora_dropout["adapter 0"] = EveryOther()
    return head


def merged():
    head = lora()
    head.merge()
    return head


def disabled():
    head = lora(train_base=True)
    head.enable_adapters(False)
    head.base_layer.requires_grad_(True)
    return head


def saved(base, tied=None):
    return peft.utils.other.ModulesToSaveWrapper(base, "default", tied_module=tied)


def linear(bias=False):
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, VOCAB, bias)


def capped(bias=False):
    return LMHead.from_linear(linear(bias), softcap=3.0)


HEADS = {
    "nn.Linear": linear,
    "nn.Linear with a bias": lambda: linear(True),
    "a weight that is computed": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "torch.compile's": lambda: torch.compile(LMHead.from_linear(linear()), backend="eager"),
    "LoRA": lora,
    "LoRA and the weight": lambda: lora(train_base=True),
    "LoRA of a layer with a bias": lambda: lora(linear(True), use_rslora=True, train_base=True),
    "LoRA with a bias": lambda: lora(lora_bias=True),
    "LoRA of both biases": lambda: lora(linear(True), lora_bias=True, train_base=True),
    "LoRA with dropout": with_dropout,
    "two LoRAs": lambda: lora(adapters=2),
    "LoRA, merged": merged,
    "LoRA, disabled": disabled,
    "modules_to_save": lambda: saved(linear()),
}
# Those with a softcap of 3.
CAPPED = {
    "LMHead": capped,
    "LMHead with a bias": lambda: capped(True),
    "LoRA of an LMHead": lambda: lora(capped(), train_base=True),
    "modules_to_save of an LMHead": lambda: saved(capped()),
    "modules_to_save of an LMHead, tied to an embedding": lambda: saved(capped(), nn.Embedding(VOCAB, HIDDEN)),
}
every_head = pytest.mark.parametrize(
    ("make", "softcap"),
    [pytest.param(x, 3.0 if x in CAPPED.values() else None, id=name) for name, x in (HEADS | CAPPED).items()],
)


def gather_when_called(head):
    """As DeepSpeed's ZeRO-3: the weight is there from the start of forward to its end, and again in backward."""
    whole, weight = head.weight.data, head.weight

    def gather(*_):
        weight.data = whole

    def free(module, given, output):
        weight.data = whole.new_empty(0)
        if output.requires_grad:
            output.register_hook(gather)

    for hook in (gather, free):
        hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(free)
    weight.data = whole.new_empty(0)
    return whole
