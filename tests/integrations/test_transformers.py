"""The patch of transformers' models: ways to call them, and reasons to refuse them."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from integrations.tiny import TINY, assert_close, assert_unchanged, batch, llama, of_labels, step, trained
from onchip.integrations.deferred_logits import SkippedLogitsError
from onchip.integrations.transformers import patch, unpatch
from onchip.torch import LMHead, cross_entropy

IDS, LABELS = batch().values()
TARGET = IDS.flatten()


def called(**more):
    return llama, lambda model: model(**batch() | more).loss


def seeded(kind, config):
    torch.manual_seed(0)
    model = kind(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def freeze(model, prefix):
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(prefix))
    return model


def mixtral():
    config = transformers.MixtralConfig(
        **TINY, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    )
    return seeded(transformers.MixtralForCausalLM, config)


def with_lm_head():
    model = llama()
    model.lm_head = LMHead.from_linear(model.lm_head)
    return model


def checkpointed():
    model = llama(num_hidden_layers=2)
    model.gradient_checkpointing_enable()
    return model.train()


def llava():
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 16, "patch_size": 8, "projection_dim": 32}  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TINY), vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_id=96, vision_feature_layer=-1,
    )  # fmt: skip
    return seeded(transformers.LlavaForConditionalGeneration, config)


def of_image(model):
    ids = IDS.clamp(max=95)
    ids[:, 2:6] = 96
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)
    return model(input_ids=ids, labels=ids.masked_fill(ids == 96, -100), pixel_values=pixels).loss


SHIFTED = torch.full((2, 12), -100).index_copy(1, torch.arange(3, 11), torch.randint(3, 97, (2, 8)))
UNCHANGED = {
    "num_items_in_batch": called(num_items_in_batch=torch.tensor(40)),
    "a number of items": called(num_items_in_batch=40),
    "shift_labels": called(shift_labels=SHIFTED),
    "ignore_index": called(labels=IDS, ignore_index=5),
    "logits_to_keep": called(labels=LABELS[:, -4:], logits_to_keep=4),
    "attention_mask": called(attention_mask=torch.tensor([[1] * 12, [0] * 4 + [1] * 8])),
    "return_dict": called(output_hidden_states=True),
    "labels by position": (llama, lambda model: model(IDS, None, None, None, None, LABELS).loss),
    "router loss": (mixtral, of_labels),
    "frozen body": (lambda: freeze(llama(), "model."), of_labels),
    "frozen head": (lambda: freeze(llama(), "lm_head"), of_labels),
    "LMHead": (with_lm_head, of_labels),
    "checkpointing": (checkpointed, of_labels),
    "images and text": (llava, of_image),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_kinds_of_models_and_calls(name):
    make, loss = UNCHANGED[name]
    assert_unchanged(make(), loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights(dtype):
    assert_unchanged(llama().to(dtype), bound=0.05)


def test_autocast():
    model, logits = llama(), []

    def loss(model):
        made = model(**batch())
        logits.append(made.logits)
        return made.loss

    with torch.autocast("cpu", torch.bfloat16):
        assert_unchanged(model, loss, bound=0.05, skip_logits=False)
    assert logits[1].dtype == torch.bfloat16
    assert torch.equal(*logits)


def test_compiled():
    torch._dynamo.reset()
    model = llama()
    expected, own = step(model), model(**batch())
    report = patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(step(compiled), expected)
    assert (report.losses, report.materialized) == (1, {})
    with pytest.raises(SkippedLogitsError, match="skip_logits=False"):
        compiled(**batch()).logits.argmax(-1)
    with torch.no_grad():
        made = torch.compile(model, fullgraph=True, backend="eager")(**batch())
    torch.testing.assert_close((made.logits, made.loss), (own.logits, own.loss))


# -------------------------------------------------------------------------------------------- a loss of the model's own


def with_loss(loss, **config):
    """A model whose own loss is this one, of its logits and labels."""
    model = llama(**config)
    model.loss_function = lambda logits, labels, **options: loss(logits, labels)
    return model


def test_logits_are_computed_once_if_the_forward_asks_for_them():
    seen = []

    def loss(z, labels):
        seen.append((z.shape, z.dtype, z.device, z.requires_grad))
        best = z.argmax(-1) * 0 + z.argmax(-1)
        assert type(z) is torch.Tensor or z.deferred.logits() is z.deferred.logits()
        return z.log_softmax(-1).sum() + 0 * best.sum()

    model = with_loss(loss)
    expected = step(model)
    report = patch(model)
    with pytest.warns(UserWarning, match=r"the logits \[2, 12, 97\] are computed and stored, because \w+ a") as warned:
        assert_close(step(model), expected)
    assert len(warned) == 2
    assert "loss_function end in" in str(warned[0].message)
    assert report.materialized == {"argmax": 2, "log_softmax": 1}
    assert seen[1] == ((2, 12, 97), torch.float32, torch.device("cpu"), True)
    assert type(model(**batch()).logits) is torch.Tensor  # nothing was fused, so they are there
    assert "argmax" in str(report)


OTHERS = {
    "a part of the vocabulary": lambda z, t: F.cross_entropy(z[..., :50].reshape(-1, 50), t.clamp(max=49)),
    "twice tanh": lambda z, t: F.cross_entropy(z.tanh().tanh().flatten(0, 1), t),
    "a negative scale": lambda z, t: F.cross_entropy((z * -1.0).flatten(0, 1), t),
    "classes first": lambda z, t: F.cross_entropy(z.transpose(1, 2), t.view(2, 12)),
    "class weights": lambda z, t: F.cross_entropy(z.flatten(0, 1), t, weight=torch.linspace(0.5, 1, 97)),
    "probabilities": lambda z, t: F.cross_entropy(z.flatten(0, 1), F.one_hot(t, 97).float()),
    "a bias": lambda z, t: F.cross_entropy((z + torch.linspace(0, 1, 97)).view(-1, 97), t),
    "in place": lambda z, t: F.cross_entropy(z.mul_(0.5).view(-1, 97), t) + 0 * z.sum(),
    "rows of one": lambda z, t: F.cross_entropy(z[0, -1][None], t[:1]) + F.cross_entropy(z[-1, 2:5], t[:3]),
    "an array of rows": lambda z, t: F.cross_entropy(z[torch.tensor([1, 0])].view(-1, 97), t),
    "other dimensions": lambda z, t: F.cross_entropy(z.unsqueeze(1).squeeze(1).view(24, -1), t),
    "unreduced": lambda z, t: F.cross_entropy(z.view(-1, 97), t, reduction="none").square().mean(),
}


@pytest.mark.filterwarnings("ignore:onchip")
@pytest.mark.parametrize("name", OTHERS)
def test_whatever_is_made_of_the_logits_is_right(name):
    """Fused or not."""
    model = with_loss(lambda z, labels: OTHERS[name](z, TARGET))
    expected = step(model)
    patch(model)
    assert_close(step(model), expected)


@pytest.mark.filterwarnings("ignore:onchip")
def test_logits_that_were_changed_in_place():
    def loss(z, labels):
        rows, doubled = z.view(-1, 97), z * 2
        z[..., :50] = -1e4
        expected = F.cross_entropy(z.deferred.value.view(-1, 97), TARGET)
        torch.testing.assert_close(F.cross_entropy(z.view(-1, 97), TARGET), expected)
        for other in (rows, doubled):
            with pytest.raises(RuntimeError, match="changed in place"):
                F.cross_entropy(other.view(-1, 97), TARGET)
        return expected

    model = with_loss(loss)
    patch(model)
    model(**batch()).loss.backward()


@pytest.mark.filterwarnings("ignore:onchip")
def test_float32_logits_that_were_changed_in_place_as_float():
    """Which is the tensor itself."""

    def loss(z, labels):
        z = z.float()
        z[..., :50] = -1e4
        return F.cross_entropy(z.view(-1, 97), TARGET.clamp(min=50))

    model = with_loss(loss)
    expected = step(model)
    patch(model)
    assert_close(step(model), expected)


@pytest.mark.filterwarnings("ignore:onchip")
def test_transforms_of_functions():
    """That take no custom loss are given logits."""
    model = llama().requires_grad_(False)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), batch()).loss

    expected = torch.func.grad(loss)(parameters)
    report = patch(model)
    torch.testing.assert_close(torch.func.grad(loss)(parameters), expected)
    assert report.losses == 0
    assert list(report.materialized) == ["a transform of torch.func"]
    patch(model.train(), z_loss=1e-4)
    with pytest.raises(RuntimeError, match=r"z_loss can't be added.*a transform of torch.func"):
        torch.func.grad(loss)(parameters)


@pytest.mark.filterwarnings("ignore:onchip")
def test_logits_that_were_read_without_gradients_have_them_later():
    def loss(z, labels):
        with torch.no_grad():
            assert not z.sum().requires_grad
        assert type(z.data) is torch.Tensor
        return z.exp().sum()

    model = with_loss(loss)
    patch(model)
    model(**batch()).loss.backward()
    assert model.lm_head.weight.grad.norm() > 0


def test_generate_leaves_the_logits():
    model = llama().eval()
    expected = model.generate(IDS, max_new_tokens=3, do_sample=False)
    report = patch(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False), expected)
    assert type(model(input_ids=IDS).logits) is torch.Tensor
    assert (report.losses, report.materialized) == (0, {})


def test_options_while_training():
    model = llama()
    logits = model(**batch()).logits[:, :-1].flatten(0, 1)
    patch(model, label_smoothing=0.1, z_loss=0.01, scratch_bytes="1MiB")
    target = LABELS[:, 1:].flatten()
    counted = logits.logsumexp(-1)[target != -100]
    expected = F.cross_entropy(logits, target, label_smoothing=0.1) + 0.01 * counted.square().mean()
    torch.testing.assert_close(model(**batch()).loss, expected)
    plain = F.cross_entropy(logits, target)
    torch.testing.assert_close(model.eval()(**batch()).loss, plain)
    patch(model.train())  # again, with others
    torch.testing.assert_close(model(**batch()).loss, plain)
    for _ in range(2):
        unpatch(model)


# ------------------------------------------------------------------------------------------------------------ refusals


def liger(model):
    def lce_forward(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    model.forward = lce_forward.__get__(model)
    return model


NOT_FUSED = {
    "Liger": (lambda: liger(llama()), "LlamaForCausalLM has a forward of its own: Liger's forward computes"),
    "no head": (lambda: llama().model, "LlamaModel has no output embeddings"),
    "float64": (lambda: llama().double(), "has a weight of torch.float64"),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_a_model_that_cannot_be_fused_is_left_as_it_is(name):
    make, reason = NOT_FUSED[name]
    model = make()
    before = model.forward
    with pytest.warns(UserWarning, match="not patched"):
        report = patch(model)
    assert not report.fused
    assert reason in report.reason
    assert str(report).startswith("not fused")
    assert model.forward == before


def test_liger_after_the_patch():
    """As Trainer applies it with use_liger_kernel=True: its forward runs, and stays."""
    model = llama()
    report = patch(model)
    with pytest.warns(UserWarning, match="forward of LlamaForCausalLM was replaced: Liger's forward") as seen:
        liger(model)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch())
    assert str(report).startswith("not fused: the forward of LlamaForCausalLM was replaced")
    unpatch(model)
    assert model.forward.__module__.startswith("liger_kernel")
    model(**batch()).loss.backward()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: patch(nn.Linear(2, 2)), TypeError, "model must be a model of transformers"),
        (lambda: patch(None), TypeError, "model must be a model of transformers"),
        (lambda: unpatch(3), TypeError, "model must be a model of transformers"),
        (lambda: patch(llama(), label_smoothing=2.0), ValueError, "label_smoothing"),
        (lambda: patch(llama(), z_loss=-1.0), ValueError, "z_loss"),
        (lambda: patch(llama(), scratch_bytes="1 barn"), ValueError, "scratch_bytes"),
        (lambda: patch(llama(), backend="cuda"), ValueError, "backend"),
        (lambda: patch(llama(), precision="half"), ValueError, "precision"),
        (lambda: patch(llama(), skip_logits="no"), TypeError, "skip_logits must be True, False or None"),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------------------------------------- Trainer


def own_cross_entropy(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs.logits, labels, shift=True)


def metrics(made):
    return {"best": float((made.predictions.argmax(-1) == made.label_ids).mean())}


TRAINED = {
    "accumulation": ({"gradient_accumulation_steps": 2}, 1e-4, True),
    "bf16": ({"bf16": True}, 2e-2, True),
    "checkpointing": ({"gradient_checkpointing": True, "max_grad_norm": 0.1}, 1e-4, True),
    "evaluation with logits": ({"metrics": metrics}, 1e-4, True),
    # A loss of Trainer's own gets the logits.
    "label_smoothing_factor": ({"label_smoothing_factor": 0.1}, 1e-5, False),
    "compute_loss_func": ({"loss": own_cross_entropy}, 1e-5, False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINED)
def test_trainer(name, tmp_path):
    args, bound, fused = TRAINED[name]
    model, patched = llama(), llama()
    report = patch(patched)
    logs = []
    for each in (model, patched):
        trainer, losses = trained(each, tmp_path, use_cpu=True, **args)
        logs.append([*losses, *trainer.evaluate().values()][: len(losses) + 1])
    torch.testing.assert_close(*logs, rtol=0, atol=bound)
    assert (report.losses > 0, report.materialized) == (fused, {})
    if name != "bf16":
        for p, q in zip(patched.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_two_processes():
    """DDP in three ways, FSDP1 and FSDP2 in seven, and transformers.Trainer under torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    made = subprocess.run(
        [*run, str(Path(__file__).with_name("two_processes.py"))], capture_output=True, text=True, timeout=300
    )
    assert "21 checks passed" in made.stdout, made.stdout + made.stderr[-4000:]
