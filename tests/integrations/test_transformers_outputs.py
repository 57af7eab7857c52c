"""The outputs of a patched model: a real loss, and logits that are real or refuse to be read."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from integrations.tiny import assert_unchanged, batch, llama, softcapped
from onchip.integrations.deferred_logits import SkippedLogits, SkippedLogitsError
from onchip.integrations.transformers import patch, token_losses, unpatch
from onchip.torch import cross_entropy, jsd, lm_loss, log_probs

IDS = batch()["input_ids"]


quiet = pytest.mark.filterwarnings("error:onchip")


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, g):
        return g / 2


def of_logits(f):
    return lambda model: f(model(input_ids=IDS).logits)


OUTSIDE = {
    "cross_entropy": of_logits(lambda z: cross_entropy(z, IDS, shift=True)),
    "log_probs": of_logits(lambda z: -log_probs(z, IDS).mean()),
    "jsd": of_logits(lambda z: jsd(z, z.detach().flip(-1))),
    "an autograd.Function": of_logits(lambda z: Halved.apply(z).square().mean()),
    "F.cross_entropy": of_logits(lambda z: F.cross_entropy(z.flatten(0, 1), IDS.flatten())),
    "nn.CrossEntropyLoss": of_logits(
        lambda z: nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")(z.view(-1, z.size(-1)) / 2, IDS.view(-1))
    ),
    "classes second": of_logits(lambda z: F.cross_entropy(z.transpose(1, 2), IDS)),
    "checkpoint": of_logits(
        lambda z: checkpoint(lambda x: F.cross_entropy(x.flatten(0, 1), IDS.flatten()), z, use_reentrant=False)
    ),
    "compiled": of_logits(
        torch.compile(lambda z: F.cross_entropy(z.flatten(0, 1), IDS.flatten()), backend="aot_eager")
    ),
    "the head's": lambda model: lm_loss(model.lm_head, model.model(input_ids=IDS).last_hidden_state, IDS),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_loss_outside_of_forward_is_that_of_real_logits(name):
    # The options are of the model's own loss alone.
    assert_unchanged(llama(), OUTSIDE[name], losses=0, z_loss=0.1, label_smoothing=0.1)


def weighted(model):
    """A loss of one's own, of the tokens' losses: of a patched model's, or of an unpatched one's logits."""
    labels = batch()["labels"]
    if "_onchip" in getattr(model, "module", model).__dict__:
        losses = token_losses(model, labels, input_ids=IDS)
    else:
        logits = model(input_ids=IDS).logits[:, :-1].float()
        losses = F.pad(F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none"), (0, 1))
    return (losses * torch.linspace(0.1, 2, 24).view(2, 12)).sum()


@quiet
@pytest.mark.parametrize("make", [llama, softcapped])
def test_losses_of_tokens(make):
    model = make()
    assert_unchanged(model, weighted, z_loss=0.1)
    expected = weighted(model)
    patch(model)
    with torch.no_grad():
        torch.testing.assert_close(weighted(model.eval()), expected.detach())
        torch.testing.assert_close(weighted(nn.DataParallel(model)), expected.detach())
    model.lm_head.register_forward_hook(lambda module, args, out: None)
    with pytest.warns(UserWarning, match="not fused any more"):
        torch.testing.assert_close(weighted(model), expected)
    torch.testing.assert_close(weighted(model), expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: token_losses(llama(), IDS, input_ids=IDS), RuntimeError, r"isn't patched, .*; call patch\(model\)"),
        (lambda m: token_losses(m, None, input_ids=IDS), TypeError, "token_losses: labels must be a"),
        (lambda m: token_losses(m, IDS[:, 1:], input_ids=IDS), ValueError, r"labels are \[2, 11\], .* \[2, 12, 97\]"),
        (lambda m: token_losses(nn.Linear(2, 2), IDS, input_ids=IDS), TypeError, "must be a model of transformers"),
    ],
)
def test_wrong_calls_for_losses_of_tokens(call, error, message):
    model = llama()
    patch(model)
    with pytest.raises(error, match=message):
        call(model)


# -------------------------------------------------------------------------------------------------- logits with labels


READ = {
    "attribute": lambda made: made.logits + 0,
    "key": lambda made: F.softmax(made["logits"], -1),
    "index": lambda made: made[1][:, -1],
    "tuple": lambda made: made.to_tuple()[1].argmax(-1),
    "items": lambda made: dict(made.items())["logits"].argmax(-1),
    "torch": lambda made: torch.argmax(made.logits, -1),
    "array": lambda made: torch.as_tensor(made.logits),
    "truth": lambda made: bool(made.logits == 0),
    "iteration": lambda made: list(made.logits),
    "cross-entropy": lambda made: F.cross_entropy(made.logits, IDS),
}


@pytest.mark.parametrize("name", READ)
def test_skipped_logits_say_so_however_they_are_read(name):
    model = llama()
    patch(model)
    made = model(**batch())
    assert isinstance(made, transformers.modeling_outputs.CausalLMOutputWithPast)
    assert not isinstance(made.logits, torch.Tensor)
    assert not hasattr(made.logits, "dtype")
    with pytest.raises(
        SkippedLogitsError, match=r"call patch\(model, skip_logits=False\), or call the model without labels"
    ):
        READ[name](made)


def test_skipped_logits_pass_through_what_copies_outputs():
    model = llama()
    patch(model)
    made = model(**batch())
    from accelerate.utils import convert_to_fp32, send_to_device

    pytree = torch.utils._pytree
    for copied in (
        convert_to_fp32(made),
        send_to_device(made, "cpu"),
        pytree.tree_map(lambda x: x, made),
        pickle.loads(pickle.dumps(made)),
        copy.copy(made),
    ):
        assert type(copied) is type(made)
        assert isinstance(copied.logits, SkippedLogits)
        torch.testing.assert_close(copied["loss"], made.loss)
    loss, logits, *_ = model(**batch(), return_dict=False)
    torch.testing.assert_close(loss, made.loss)
    assert isinstance(logits, SkippedLogits)


def evaluated(model):
    with torch.no_grad():
        return model(**batch())


def inferred(model):
    with torch.inference_mode():
        return model(**batch())


LABELLED = {
    "no_grad": (evaluated, {}),
    "inference mode": (inferred, {}),
    "eval": (lambda m: m.eval()(**batch()), {}),
    "tuple": (lambda m: m.eval()(**batch(), return_dict=False), {}),
    "asked for": (lambda m: m(**batch()), {"skip_logits": False}),
}


@quiet
@pytest.mark.parametrize("name", LABELLED)
def test_logits_beside_a_fused_loss_are_real(name):
    call, options = LABELLED[name]
    model = llama()
    expected = call(model)
    report = patch(model.train(), **options)
    made = call(model)
    for x, y in zip(made[:2], expected[:2], strict=True):
        assert type(x) is torch.Tensor
        torch.testing.assert_close(x, y)
    assert (report.losses, report.materialized) == (1, {})
    for other in (lambda p: p.data.zero_(), lambda p: p.detach().neg_()):
        other(model.lm_head.weight)
        torch.testing.assert_close(made[1], expected[1])  # whatever is done to the weights later


def test_gradients_of_a_loss_and_of_logits_add_up():
    def loss(model):
        made = model(**batch())
        return made.loss + Halved.apply(made.logits).square().mean()

    assert_unchanged(llama(), loss, skip_logits=False)


def test_evaluation_that_stores_no_logits():
    model = llama().eval()
    report = patch(model, skip_logits=True)
    assert isinstance(evaluated(model).logits, SkippedLogits)
    assert (report.losses, report.materialized) == (1, {})


# ------------------------------------------------------------------------- weights and adapters that change in between


def adapted(**config):
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, init_lora_weights=False, **config))
    if "modules_to_save" in config:
        with torch.no_grad():
            model.get_base_model().lm_head.modules_to_save["default"].weight.add_(0.1)
    return model.train()


def disabled(model):
    with model.disable_adapter():
        return model(**batch())


def another(model):
    import peft

    if "other" not in model.peft_config:
        torch.manual_seed(7)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    model.set_adapter("default")
    made = model(**batch())
    model.set_adapter("other")
    return made


def averaged(model):
    made = model(**batch())
    for p in model.parameters():
        p.data.copy_(p.data * 0.5)
    return made


def assigned(model):
    made = model(**batch())
    model.load_state_dict({name: x * 0.5 for name, x in model.state_dict().items()}, assign=True)
    return made


def fused_step(model):
    made = model(**batch())
    made.loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    return made


def then_evaluated(model):
    torch.manual_seed(9)
    made = model(**batch())
    model.eval()
    return made


HEAD = {"target_modules": ["lm_head"]}
CHANGES = {
    "disabled adapters": (lambda: adapted(**HEAD), disabled),
    "modules_to_save": (lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]), disabled),
    "another adapter": (lambda: adapted(**HEAD), another),
    "moving average": (llama, averaged),
    "assigned weights": (llama, assigned),
    "a fused optimizer": (llama, fused_step),
    "dropout": (lambda: adapted(**HEAD, lora_dropout=0.5), then_evaluated),
}


@quiet
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("skip_logits", [None, False])
def test_logits_are_those_of_the_call_or_there_are_none(name, skip_logits):
    make, change = CHANGES[name]
    expected = change(make()).logits
    model = make()
    report = patch(model, skip_logits=skip_logits)
    made = change(model)
    assert report.losses == 1
    if skip_logits is None:
        with pytest.raises(SkippedLogitsError, match="skip_logits=False"):
            made.logits.argmax(-1)
    else:
        torch.testing.assert_close(made.logits, expected)


def test_logits_after_unpatch():
    model = llama()
    expected = model(**batch()).logits
    patch(model, skip_logits=False)
    made = model(**batch())
    unpatch(model)
    assert torch.equal(made.logits, expected)


# ------------------------------------------------------------------------------------------------------ inside forward


def test_what_a_hook_kept_of_the_forward_is_refused_later():
    kept = []
    model = llama()
    model.loss_function = lambda logits, labels, **_: kept.append(logits) or F.cross_entropy(logits[0], labels[0])
    patch(model)
    model(**batch())
    with pytest.raises(RuntimeError, match="stand for the logits of a forward that has ended"):
        kept[0].sum()


def test_a_function_that_takes_the_logits_inside_of_forward_is_refused():
    """It skips what the logits stand for, and would leave the weights without a gradient."""
    model = llama()
    model.loss_function = lambda logits, labels, **_: Halved.apply(logits).square().mean()
    patch(model)
    with pytest.warns(UserWarning, match=r"asks for them .*, or call onchip\.torch\.lm_loss on the head"):
        loss = model(**batch()).loss
    with pytest.raises(RuntimeError, match=r"passed its logits to an autograd\.Function.*unpatch"):
        loss.backward()


OWN = {
    "log_softmax": lambda logits, labels, **_: -logits.log_softmax(-1).mean(),
    "class weights": lambda logits, labels, **_: F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), weight=torch.ones(97)
    ),
    "classes second": lambda logits, labels, **_: F.cross_entropy(logits.transpose(1, 2), labels),
}


@pytest.mark.filterwarnings("ignore:onchip")
@pytest.mark.parametrize("loss", OWN.values(), ids=OWN)
@pytest.mark.parametrize("option", ["z_loss", "label_smoothing"])
def test_options_that_the_models_own_loss_cannot_have(loss, option):
    model = llama()
    model.loss_function = loss
    expected = model(**batch()).loss
    patch(model, **{option: 0.1})
    with pytest.raises(RuntimeError, match=f"{option} can't be added to this loss: .*leave it out of patch"):
        model(**batch())
    assert model.lm_head._onchip_call is None
    torch.testing.assert_close(model.eval()(**batch()).loss, expected)


def test_a_forward_that_raises_leaves_the_head_as_it_was():
    model = llama()
    expected = model(input_ids=IDS).logits
    patch(model)
    with pytest.raises(ValueError, match=r"out of range|97|label"):
        model(input_ids=IDS, labels=torch.full_like(IDS, 1000))
    assert torch.equal(model(input_ids=IDS).logits, expected)
    assert torch.equal(model.lm_head(torch.ones(1, 32)), nn.functional.linear(torch.ones(1, 32), model.lm_head.weight))
