"""What a model does between hidden states and logits is taken into account, or the model is refused."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from onchip.torch import lm_jsd, lm_log_probs

IDS = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """What makes logits of hidden states is a function that is given."""

    def __init__(self, logits, head=None):
        super().__init__()
        self.body, self.lm_head, self.logits = nn.Embedding(60, 16), head or nn.Linear(16, 60), logits
        self.norm = nn.LayerNorm(16)
        self.register_buffer("scale", torch.tensor(0.5))

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.logits(self, self.body(input_ids)[0]))


KNOWN = {
    "nothing": (lambda m, h: m.lm_head(h), {}),
    "a buffer": (lambda m, h: m.lm_head(h) * m.scale, {"logit_scale": 0.5}),
    "a cap, then a scale": (lambda m, h: 3 * torch.tanh(m.lm_head(h) / 2), {"logit_scale": 1.5, "softcap": 3.0}),
    "a scale, then a cap": (lambda m, h: 3 * torch.tanh(m.lm_head(h) / 9), {"logit_scale": 1 / 3, "softcap": 3.0}),
    "float32": (lambda m, h: F.hardtanh(m.lm_head(h.half()).float() / 7, -1e38, 1e38), {"logit_scale": 1 / 7}),
}


@pytest.mark.parametrize(("logits", "options"), KNOWN.values(), ids=KNOWN)
def test_what_a_model_does_is_seen(logits, options):
    model, hidden = Model(logits), torch.randn(2, 9, 16)
    expected = lm_log_probs(model.lm_head, hidden, IDS, **options)
    torch.testing.assert_close(lm_log_probs(model, hidden, IDS), expected, rtol=1e-6, atol=1e-6)


def replaced():
    model = Model(KNOWN["nothing"][0])
    model.forward = lambda **given: None
    return model


def of_roberta():
    config = transformers.RobertaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    return transformers.RobertaForCausalLM(config)


def scaled_twice(model, hidden):
    return model.lm_head(hidden) + model.lm_head(hidden)


UNKNOWN = {
    "hidden is scaled": (lambda: Model(lambda m, h: m.lm_head(h / 2)), "its head is called with something other than the last hidden states"),
    "a layer between": (lambda: Model(lambda m, h: m.lm_head(m.norm(h)[0])), "a LayerNorm comes between hidden states and logits"),
    "a head of two calls": (lambda: Model(scaled_twice), "its forward calls the head 2 times"),
    "no call": (lambda: Model(lambda m, h: F.linear(h, m.lm_head.weight)), "its forward calls the head 0 times"),
    "a bias afterwards": (lambda: Model(lambda m, h: m.lm_head(h) + torch.arange(60)), "it changes single entries of its logits"),
    "an offset": (lambda: Model(lambda m, h: m.lm_head(h) + 1), "it does more to its logits than scale them or cap them by a tanh"),
    "another cap": (lambda: Model(lambda m, h: m.lm_head(h).clamp(-5, 5)), "it does more to its logits than scale them or cap them by a tanh"),
    "a negative scale": (lambda: Model(lambda m, h: -m.lm_head(h)), "its logits are scaled by -1.0"),
    "a slice": (lambda: Model(lambda m, h: m.lm_head(h)[..., :50]), "it turns logits [1, 1, 60] into [1, 1, 50]"),
    "a transposed result": (lambda: Model(lambda m, h: m.lm_head(h).mT), "it turns logits [1, 1, 60] into [1, 60, 1]"),
    "an error": (lambda: Model(lambda m, h: h.nothing), "has no attribute 'nothing'"),
    "a forward that was replaced": (replaced, "Model of test_lm_head_models_errors whose forward was replaced"),
    "a head inside": (of_roberta, "its head lies inside another module"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_model_that_is_not_understood(make, message):
    hidden = torch.randn(2, 9, 16)
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        lm_log_probs(make(), hidden, IDS)
    said = str(caught.value)
    assert said.startswith("lm_log_probs: can't tell what ")
    assert "pass its head instead, as model.get_output_embeddings(), with the model's own softcap=" in said
    with pytest.raises(TypeError, match=r"if its logits are the model's, .* or pass both models' logits to jsd"):
        lm_jsd(make(), hidden, teacher_logits=torch.randn(2, 9, 60))
