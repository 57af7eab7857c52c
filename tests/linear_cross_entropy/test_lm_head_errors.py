"""Every way to call `LMHead`, `lm_loss`, `lm_log_probs` and `lm_jsd` wrongly, and every head of another kind."""

import re
import warnings

import peft
import pytest
import torch
from heads import HIDDEN, VOCAB, capped, inputs, linear, lora, merged
from peft import LoHaConfig
from torch import nn

from onchip.torch import Fp8Linear, LMHead, lm_jsd, lm_log_probs, lm_loss


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


def halve(module, given, logits):
    return logits / 2


HOOKS = {
    "forward hook": lambda layer: layer.register_forward_hook(halve),
    "forward pre hook": lambda layer: layer.register_forward_pre_hook(lambda module, given: (2 * given[0],)),
    "backward hook": lambda layer: layer.register_full_backward_hook(lambda module, to_input, to_output: None),
    "backward pre hook": lambda layer: layer.register_full_backward_pre_hook(lambda module, to_output: None),
}


def hooked(layer, hook="forward hook"):
    HOOKS[hook](layer)
    return layer


def jsd_of(*given, **options):
    hidden, labels = inputs()
    return lambda: lm_jsd(linear(), hidden, *given, **{"labels": labels} | options)


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
    "labels and compute": (lambda: ALONE(*inputs(), compute=print), TypeError, "LMHead: compute takes only input, weight and bias; pass no labels or options"),
    "options and compute": (lambda: ALONE(inputs()[0], compute=print, softcap=3.0), TypeError, "LMHead: compute takes only input, weight and bias"),
    "no ids": (lambda: lm_log_probs(linear(), inputs()[0]), TypeError, "lm_log_probs: ids is missing or None; pass it (labels is another name for it)"),
    "ids and labels": (lambda: lm_log_probs(linear(), *inputs(), labels=inputs()[1]), TypeError, "lm_log_probs: labels is another name for ids"),
    "ids that are a list": (lambda: lm_log_probs(linear(), inputs()[0], [1]), TypeError, "lm_log_probs: ids must be a torch.Tensor; got list"),
    "hidden that is an output": (lambda: lm_log_probs(linear(), (inputs()[0],), inputs()[1]), TypeError, "lm_log_probs: hidden must be a torch.Tensor; got tuple"),
    "an option of the loss": (lambda: lm_log_probs(linear(), *inputs(), z_loss=0.1), TypeError, "unexpected keyword argument 'z_loss'"),
    "log-probabilities of a weight": (lambda: lm_log_probs(linear().weight, *inputs()), TypeError, "lm_log_probs: head must be a torch.nn.Linear or an LMHead"),
    "log-probabilities under DoRA": (lambda: lm_log_probs(lora(use_dora=True), *inputs()), TypeError, "lm_log_probs: head's adapter 'adapter 0' is a DoraLinearVariant"),
    "no teacher": (jsd_of(), ValueError, "linear_jsd: pass exactly one of teacher_hidden with teacher_weight, teacher_logits, teacher_topk; got 0"),
    "a teacher without hidden": (jsd_of(linear()), ValueError, "lm_jsd: teacher and teacher_hidden go together; got one of them"),
    "hidden without a teacher": (jsd_of(teacher_hidden=inputs()[0]), ValueError, "lm_jsd: teacher and teacher_hidden go together"),
    "two teachers": (jsd_of(linear(), inputs()[0], teacher_logits=torch.ones(2, 9, VOCAB)), ValueError, "linear_jsd: pass exactly one of"),
    "a teacher's weight": (jsd_of(linear().weight, inputs()[0]), TypeError, "lm_jsd: head must be a torch.nn.Linear or an LMHead"),
    "a teacher's hidden is a list": (jsd_of(linear(), [1.0]), TypeError, "lm_jsd: teacher_hidden must be a torch.Tensor; got list"),
    "hard labels that aren't there": (jsd_of(linear(), inputs()[0], labels=None, hard_weight=0.5), ValueError, "linear_jsd: hard_weight=0.5 needs target, the hard labels"),
    "target and labels": (jsd_of(linear(), inputs()[0], target=inputs()[1]), TypeError, "lm_jsd: labels is another name for target; pass one of them"),
    "labels that are a list": (jsd_of(linear(), inputs()[0], labels=[1]), TypeError, "lm_jsd: target must be a torch.Tensor; got list"),
    "shift is 1": (jsd_of(linear(), inputs()[0], shift=1), TypeError, "lm_jsd: shift must be True or False; got int"),
    "ignore_index is a float": (jsd_of(linear(), inputs()[0], ignore_index=0.0), TypeError, "lm_jsd: ignore_index must be an int"),
    "a softcap of a divergence": (jsd_of(linear(), inputs()[0], softcap=3.0), TypeError, "unexpected keyword argument 'softcap'"),
    "a student with a softcap": (lambda: lm_jsd(capped(), inputs()[0], linear(), inputs()[0]), ValueError, "lm_jsd: the student's logits have softcap=3.0, which linear_jsd doesn't compute; pass both models' logits to jsd"),
    "a teacher under LoRA with a softcap": (jsd_of(lora(capped()), inputs()[0]), ValueError, "lm_jsd: the teacher's logits have softcap=3.0"),
    "a weight": (loss_of(lambda: linear().weight), TypeError, "lm_loss: head must be a torch.nn.Linear or an LMHead, or one of these in PEFT's LoRA layer or modules_to_save, or a model with get_output_embeddings; got Parameter"),
    "an embedding": (loss_of(lambda: nn.Embedding(VOCAB, HIDDEN)), TypeError, "got Embedding, whose logits may be something else"),
    "a layer in a container": (loss_of(lambda: nn.Sequential(linear())), TypeError, "got Sequential, "),
    "a subclass with a forward of its own": (loss_of(lambda: Fp8Linear(HIDDEN, VOCAB)), TypeError, "got Fp8Linear, whose"),
    "a forward that was replaced": (loss_of(lambda: replaced(linear)), TypeError, "got Linear whose forward was replaced"),
    "DataParallel": (loss_of(lambda: nn.DataParallel(LMHead(HIDDEN, VOCAB))), TypeError, "got DataParallel, "),
    "DoRA": (loss_of(lambda: lora(use_dora=True)), TypeError, "head's adapter 'adapter 0' is a DoraLinearVariant, whose logits aren't a sum of two products"),
    "LoHa": (loss_of(loha), TypeError, "got Linear of peft.tuners.loha.layer, "),
    "LoRA of another layer": (loss_of(lambda: lora(Fp8Linear(HIDDEN, VOCAB))), TypeError, "got Fp8Linear, whose"),
    "LoRA, merged and disabled": (loss_of(merged_and_disabled), RuntimeError, "lm_loss: head's adapters are merged into its weight, but disabled; call head.unmerge()"),
    "LoRA with a forward that was replaced": (loss_of(lambda: replaced(lora)), TypeError, "got Linear of peft.tuners.lora.layer whose forward was replaced"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


CALLS = {
    "lm_loss": lambda head: lm_loss(head, *inputs()),
    "lm_log_probs": lambda head: lm_log_probs(head, *inputs()),
    "lm_jsd": lambda head: lm_jsd(head, inputs()[0], teacher_logits=torch.ones(2, 9, VOCAB)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_for_logits_are_never_given_a_loss(hook):
    """They run once on logits; whatever takes no logits says so."""
    hidden, labels = inputs()
    remedy = f"has a {hook}, .* expects logits, but none are computed; remove it, or compute the logits"
    with pytest.raises(RuntimeError, match=f"LMHead.from_linear: Linear {remedy}"):
        LMHead.from_linear(hooked(linear(), hook))
    head = hooked(LMHead.from_linear(linear()), hook)
    assert torch.equal(head(hidden), hooked(linear(), hook)(hidden))
    for call in (lambda: head(hidden, labels=labels), lambda: head(hidden, compute=print)):
        with pytest.raises(RuntimeError, match=f"LMHead: LMHead {remedy}"):
            call()
    for op, call in CALLS.items():
        with pytest.raises(RuntimeError, match=f"LMHead: LMHead {remedy}"):
            call(head)
        for layer in (linear(), lora()):
            with pytest.raises(RuntimeError, match=f"{op}: Linear.* {remedy}"):
                call(hooked(layer, hook))


@pytest.mark.filterwarnings("ignore")
def test_hooks_that_make_a_weight_go_on():
    layer, (hidden, labels) = nn.utils.weight_norm(linear()), inputs()
    expected = nn.functional.cross_entropy(layer(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(LMHead.from_linear(layer)(hidden, labels), expected)


def test_labels_that_seem_to_be_shifted():
    """A warning, unless the caller, or the head, says whether they are."""
    hidden, ids = inputs()
    ids = ids.clamp(min=0)
    shifted = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    ways = {
        "LMHead": lambda labels, **options: LMHead.from_linear(linear(), **options)(hidden, labels),
        "lm_loss": lambda labels, **options: lm_loss(linear(), hidden, labels, **options),
        "lm_log_probs": lambda labels, **options: lm_log_probs(linear(), hidden, labels, **options),
        "lm_jsd": lambda labels, **options: lm_jsd(
            linear(), hidden, teacher_logits=torch.ones(2, 9, VOCAB), labels=labels, **options
        ),
    }
    padded = shifted.clone()
    padded[0, 5:] = -100
    for op, call in ways.items():
        with pytest.warns(UserWarning, match=rf"{op}: these labels look shifted already: .*Pass shift=False"):
            call(shifted)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for shift in (True, False):
                call(shifted, shift=shift)
            for labels in (ids, padded, shifted.to("cpu").roll(1, -1)):
                call(labels)
    with pytest.warns(UserWarning, match="LMHead: these labels look shifted already"):
        ways["LMHead"](shifted.clamp(min=0).index_fill(1, torch.tensor([8]), 69), ignore_index=69)
