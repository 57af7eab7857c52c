"""`lm_loss`, `lm_log_probs` and `lm_jsd` on whole models, compared with the models' own logits."""

import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from onchip.torch import LMHead, lm_jsd, lm_log_probs, lm_loss

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.arange(9) == 4, -100)
# The class, and its options that matter here.
MODELS = {
    "Llama": {},
    "Gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 3.0},
}
UNCAPPED = [name for name in MODELS if name != "Gemma2"]
ADAPTERS = {
    "alone": None,
    "LoRA of the head": {"target_modules": ["lm_head", "q_proj"], "lora_dropout": 0.0},
    "the head saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def model_of(name, adapter=None, **options):
    torch.manual_seed(1)
    options = {"tie_word_embeddings": False} | MODELS[name] | options
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_()  # so that a softcap and a scale matter
    if ADAPTERS.get(adapter):
        return peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, **ADAPTERS[adapter])).eval()
    return model


def hidden_of(model):
    return model.get_decoder()(input_ids=IDS).last_hidden_state


def log_prob_of(logits):
    return logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]


def gradients(model):
    made = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return made


def assert_same_steps(model, make, expect):
    """Of `make(model, hidden)` and `expect(logits)`: the numbers, and the gradients of all that trains."""
    made = make(model, hidden_of(model))
    made.sum().backward()
    grads = gradients(model)
    expected = expect(model(input_ids=IDS).logits)
    expected.sum().backward()
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    expected_grads = gradients(model)
    assert any("lm_head" in name for name in grads)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_losses_are_of_the_models_own_logits(name, adapter):
    model = model_of(name, adapter)
    assert_same_steps(model, lambda m, h: lm_log_probs(m, h, IDS)[:, :-1], log_prob_of)
    assert_same_steps(
        model,
        lambda m, h: lm_loss(m, h, LABELS, label_smoothing=0.1),
        lambda z: F.cross_entropy(z[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), label_smoothing=0.1),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNCAPPED)
def test_divergences_are_of_the_models_own_logits(name):
    student, teacher = model_of(name, "LoRA of the head"), model_of("Cohere", "the head saved", logit_scale=1.7)
    with torch.no_grad():
        teacher_hidden, t = hidden_of(teacher), teacher(input_ids=IDS).logits[:, :-1].log_softmax(-1)

    def plain(logits):  # the forward KL
        return (t.exp() * (t - logits[:, :-1].log_softmax(-1))).sum(-1)[LABELS[:, 1:] != -100].mean()

    assert_same_steps(student, lambda m, h: lm_jsd(m, h, teacher, teacher_hidden, labels=LABELS, beta=0.0), plain)
    with pytest.raises(
        ValueError, match=r"lm_jsd: the teacher's logits have softcap=2.0, .*pass both models' logits to"
    ):
        lm_jsd(student, hidden_of(student), model_of("Gemma2"), hidden_of(student))


class Wrapper(nn.Module):
    """What is known by its name."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def prepared(model):
    """By accelerate, which is set up once in a process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        return Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


WRAPPERS = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "DDP": type("DistributedDataParallel", (Wrapper,), {}),
    "DeepSpeed": type("DeepSpeedEngine", (Wrapper,), {}),
    "DataParallel": nn.DataParallel,
    "accelerate": prepared,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_model_is_found_in_what_wraps_it(wrap):
    model = model_of("Gemma2")
    hidden = hidden_of(model)
    expected = lm_log_probs(model, hidden, IDS)
    assert torch.equal(lm_log_probs(wrap(model), hidden, IDS), expected)


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_taken_as_they_are_at_the_call():
    model = model_of("Granite", "LoRA of the head")
    with torch.no_grad(), model.disable_adapter():
        made, expected = lm_log_probs(model, hidden_of(model), IDS), log_prob_of(model(input_ids=IDS).logits)
    torch.testing.assert_close(made[:, :-1], expected, rtol=1e-5, atol=1e-5)


def test_a_model_with_an_lm_head():
    """Its own options enter, and the model's."""
    model = model_of("Gemma2")
    hidden = hidden_of(model).detach()
    expected = lm_log_probs(model, hidden, IDS)
    model.lm_head = LMHead.from_linear(model.lm_head)
    assert torch.equal(lm_log_probs(model, hidden, IDS), expected)
    model.lm_head = LMHead(16, 60, bias=False, softcap=2.0, temperature=0.5)
    logits = 2 * torch.tanh(model.lm_head(hidden) / 2) / 0.5
    torch.testing.assert_close(lm_log_probs(model, hidden, IDS)[:, :-1], log_prob_of(logits))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(lm_loss(model, hidden, IDS), loss)


def test_a_whole_model_compiles():
    torch._dynamo.reset()
    model = model_of("Gemma2")
    hidden = hidden_of(model).detach()
    compiled = torch.compile(lambda h: lm_log_probs(model, h, IDS), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden), lm_log_probs(model, hidden, IDS))


def test_options_that_are_not_the_models():
    model, hidden = model_of("Gemma2"), torch.randn(2, 9, 16)
    said = r"got softcap=3.0, but the logits of Gemma2ForCausalLM have softcap=2.0; leave it out, or pass the head"
    for call in (lm_loss, lm_log_probs):
        with pytest.raises(ValueError, match=said):
            call(model, hidden, IDS, softcap=3.0)
        with pytest.raises(ValueError, match="got softcap=None, but"):
            call(model, hidden, IDS, softcap=None)
        assert torch.equal(call(model, hidden, IDS, softcap=2.0), call(model, hidden, IDS))
        with pytest.raises(ValueError, match=r"got logit_scale=0.5, but the logits of Gemma2ForCausalLM have"):
            call(model, hidden, IDS, logit_scale=0.5)
    model.lm_head = LMHead.from_linear(model.lm_head, softcap=5.0)
    for call in (lm_loss, lm_log_probs, lambda *given: lm_jsd(*given[:2], teacher_logits=torch.ones(2, 9, 60))):
        with pytest.raises(ValueError, match=r"an LMHead with softcap=5.0, but the logits of Gemma2ForCausalLM have"):
            call(model, hidden, IDS)
    with pytest.raises(TypeError, match="LlamaModel has no output embeddings; pass its head, the last linear layer"):
        lm_loss(model_of("Llama").model, hidden, IDS)


def test_nothing_of_the_model_changes():
    """Nor of the state of random numbers; and no warning comes of it."""
    model, hidden = model_of("Granite").train(), torch.randn(2, 9, 16)
    before, state = {x: vars(model)[x] for x in vars(model)}, torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.device("meta"):  # whatever the default is
            lm_log_probs(model, hidden, IDS)
    assert vars(model) == before
    assert torch.equal(torch.get_rng_state(), state)
