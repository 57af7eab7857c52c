"""Every way to call `LMHead` and `lm_loss` wrongly, and every head that has a loss of another kind."""

import re

import peft
import pytest
import torch
from heads import HIDDEN, VOCAB, inputs, linear, lora, merged
from peft import LoHaConfig
from torch import nn

from onchip.torch import Fp8Linear, LMHead, lm_loss


def replaced(make):
    layer = make()
    layer.forward = lambda x: x
    return layer


def merged_and_disabled():
    head = merged()
    head.enable_adapters(False)
    return head


def loha():
    model = nn.ModuleDict({"lm_head": linear()})
    return peft.inject_adapter_in_model(LoHaConfig(r=4, target_modules=["lm_head"]), model)["lm_head"]


def loss_of(make):
    return lambda: lm_loss(make(), *inputs())


ALONE = LMHead(HIDDEN, VOCAB)
WRONG = {
    "an option that there isn't": (lambda: LMHead(4, 8, soft_cap=3.0), TypeError, "LMHead: there is no option 'soft_cap'; options are shift, ignore_index,"),
    "an option of each call": (lambda: LMHead(4, 8, token_weight=torch.ones(2)), TypeError, "there is no option 'token_weight'"),
    "a wrong option": (lambda: LMHead(4, 8, softcap=0.0), ValueError, "softcap must be above 0"),
    "a wrong option of from_linear": (lambda: LMHead.from_linear(linear(), reduction="avg"), ValueError, "reduction must be one of"),
    "from a layer of another class": (lambda: LMHead.from_linear(ALONE), TypeError, "LMHead.from_linear: it takes a torch.nn.Linear; got LMHead"),
    "from a LoRA": (lambda: LMHead.from_linear(lora()), TypeError, "LMHead.from_linear: it takes a torch.nn.Linear; got Linear of peft.tuners.lora.layer"),
    "from a forward of its own": (lambda: LMHead.from_linear(replaced(linear)), TypeError, "LMHead.from_linear: linear.forward was replaced"),
    "options without labels": (lambda: ALONE(inputs()[0], softcap=3.0, z_loss=0.1), TypeError, "LMHead: softcap, z_loss can only be given with labels"),
    "an unknown option of a call": (lambda: ALONE(*inputs(), soft_cap=3.0), TypeError, "unexpected keyword argument 'soft_cap'"),
    "a bias": (lambda: ALONE(*inputs(), bias=None), TypeError, "multiple values for argument 'bias'"),
    "no labels": (lambda: lm_loss(linear(), inputs()[0], None), TypeError, "lm_loss: labels must be a torch.Tensor; got NoneType"),
    "no labels for an LMHead": (lambda: lm_loss(ALONE, inputs()[0], None), TypeError, "lm_loss: labels must be a torch.Tensor; got NoneType"),
    "hidden that is a list": (lambda: lm_loss(lora(), [1.0], inputs()[1]), TypeError, "lm_loss: hidden must be a torch.Tensor; got list"),
    "a single token": (lambda: lm_loss(ALONE, torch.ones(HIDDEN), torch.tensor(3)), ValueError, "shift=True needs target of shape [..., S]"),
    "a weight": (loss_of(lambda: linear().weight), TypeError, "lm_loss: head must be a torch.nn.Linear or an LMHead, or one of these in PEFT's LoRA layer or modules_to_save, or a model with get_output_embeddings; got Parameter"),
    "an embedding": (loss_of(lambda: nn.Embedding(VOCAB, HIDDEN)), TypeError, "got Embedding, whose logits may be something else"),
    "a layer in a container": (loss_of(lambda: nn.Sequential(linear())), TypeError, "got Sequential, "),
    "a subclass with a forward of its own": (loss_of(lambda: Fp8Linear(HIDDEN, VOCAB)), TypeError, "got Fp8Linear, whose"),
    "a forward that was replaced": (loss_of(lambda: replaced(linear)), TypeError, "got Linear whose forward was replaced"),
    "DataParallel": (loss_of(lambda: nn.DataParallel(LMHead(HIDDEN, VOCAB))), TypeError, "got DataParallel, "),
    "DoRA": (loss_of(lambda: lora(use_dora=True)), TypeError, "adapter 'adapter 0' of head is a DoraLinearVariant, whose logits are no sum of two products"),
    "LoHa": (loss_of(loha), TypeError, "got Linear of peft.tuners.loha.layer, "),
    "LoRA of another layer": (loss_of(lambda: lora(Fp8Linear(HIDDEN, VOCAB))), TypeError, "got Fp8Linear, whose"),
    "LoRA, merged and disabled": (loss_of(merged_and_disabled), RuntimeError, "lm_loss: the adapters of head are merged into its weight, and disabled; call head.unmerge()"),
    "LoRA with a forward that was replaced": (loss_of(lambda: replaced(lora)), TypeError, "got Linear of peft.tuners.lora.layer whose forward was replaced"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()
