"""`lm_log_probs` and `lm_jsd` on heads of every kind, compared with their logits in float64."""

import copy

import pytest
import torch
from heads import HEADS, HIDDEN, VOCAB, every_head, gather_when_called, inputs, linear, lora
from torch import nn

from onchip.torch import LMHead, TopK, linear_jsd, lm_jsd, lm_log_probs


def in_float64(head, hidden):
    """A copy, and what it makes of hidden states."""
    head, hidden = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    head.zero_grad()
    return head, hidden, head(hidden)


def gradients(head, hidden):
    return {name: p.grad.double() for name, p in head.named_parameters() if p.grad is not None} | {
        "hidden": hidden.grad.double()
    }


@pytest.mark.filterwarnings("ignore")
@every_head
def test_log_probs_of_every_head(make, softcap):
    head, (hidden, ids) = make(), inputs()
    upstream = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    copied, theirs, logits = in_float64(head, hidden)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
    log_p, following = logits.log_softmax(-1), torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    expected = log_p.gather(-1, following.clamp(min=0)[..., None])[..., 0].masked_fill(following == -100, 0)
    entropy = -(log_p.exp() * log_p).sum(-1).masked_fill(following == -100, 0)
    ((expected + 0.1 * entropy) * upstream).sum().backward()
    head.zero_grad()
    made = lm_log_probs(head, hidden, ids, entropy=True, temperature=0.7)
    ((made.log_prob + 0.1 * made.entropy) * upstream).sum().backward()
    torch.testing.assert_close(made.log_prob.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(made.entropy.double(), entropy, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradients(head, hidden), gradients(copied, theirs), rtol=1e-4, atol=2e-6)


def divergence(s, t, beta, kept):
    """Of logits, the mean over the positions that are kept."""
    s, t = s.log_softmax(-1), t.log_softmax(-1)
    m = torch.logsumexp(torch.stack([s + torch.tensor(1 - beta).log(), t + torch.tensor(beta).log()]), 0)
    loss = ((1 - beta) * s.exp() * (s - m) + beta * t.exp() * (t - m)).sum(-1)
    return loss[kept].mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_divergence_of_every_head(make):
    student, (hidden, labels) = make(), inputs()
    teacher, teacher_hidden = lora(nn.Linear(8, VOCAB)), torch.randn(2, 9, 8, requires_grad=True)
    copied, theirs, logits = in_float64(student, hidden)
    kept = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) != -100
    expected = divergence(logits / 2, in_float64(teacher, teacher_hidden)[2].detach() / 2, 0.3, kept)
    expected.backward()
    student.zero_grad()
    loss = lm_jsd(student, hidden, teacher, teacher_hidden, labels=labels, beta=0.3, temperature=2.0)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients(student, hidden), gradients(copied, theirs), rtol=1e-4, atol=1e-7)
    assert teacher_hidden.grad is None
    assert all(p.grad is None for p in teacher.parameters())


def test_what_labels_and_weights_are_of():
    """Labels and token_weight are shifted, a top-k teacher is not, and without labels nothing is."""
    head, (hidden, labels) = linear(), inputs()
    weight, token_weight = head.weight, torch.rand(2, 9)
    values, indices = torch.randn(2, 9, VOCAB).log_softmax(-1).topk(4)
    topk = TopK(indices, values, "log_probs", "tail")
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    after = torch.nn.functional.pad(token_weight[:, 1:], (0, 1))
    common = {"teacher_topk": topk, "hard_weight": 0.5, "reduction": "none"}
    made = lm_jsd(head, hidden, labels=labels, token_weight=token_weight, **common)
    assert torch.equal(made, linear_jsd(hidden, weight, target=following, token_weight=after, **common))
    made = lm_jsd(head, hidden, target=labels, token_weight=token_weight, shift=False, **common)
    assert torch.equal(made, linear_jsd(hidden, weight, target=labels, token_weight=token_weight, **common))
    made = lm_jsd(head, hidden, teacher_topk=topk, token_weight=token_weight)
    assert torch.equal(made, linear_jsd(hidden, weight, teacher_topk=topk, token_weight=token_weight))
    ids = torch.stack([labels, labels.roll(1, 0)], -1)
    several = lm_log_probs(head, hidden, ids)
    assert torch.equal(several[..., 0], lm_log_probs(head, hidden, labels=labels))
    aligned = lm_log_probs(head, hidden, following, shift=False)
    assert torch.equal(several[..., 0], aligned)


def test_an_lm_head_has_options_of_its_own():
    """A scale, a temperature, what is ignored, whether labels are shifted; in both ops.  Those of a call go first."""
    hidden, labels = inputs()
    plain, kept = linear(True), labels.masked_fill(labels == -100, 7)
    head = LMHead.from_linear(plain, logit_scale=0.5, temperature=0.25, ignore_index=7, shift=False, z_loss=0.1)
    logits = (2 * plain(hidden)).detach().double()
    expected = logits.log_softmax(-1).gather(-1, kept[..., None])[..., 0].masked_fill(kept == 7, 0)
    torch.testing.assert_close(lm_log_probs(head, hidden, kept).double(), expected, rtol=1e-5, atol=1e-5)
    teacher = torch.randn(2, 9, VOCAB)
    made = lm_jsd(head, hidden, teacher_logits=teacher, labels=kept, beta=0.5)
    torch.testing.assert_close(made.double(), divergence(logits, teacher.double(), 0.5, kept != 7), rtol=1e-5, atol=0)
    assert torch.equal(lm_log_probs(head, hidden, kept, ignore_index=-100, shift=True)[:, -1], torch.zeros(2))
    torch.testing.assert_close(
        lm_log_probs(head, hidden, kept, temperature=0.5).double(),
        (logits / 2).log_softmax(-1).gather(-1, kept[..., None])[..., 0].masked_fill(kept == 7, 0),
        rtol=1e-5,
        atol=1e-5,
    )


def test_weights_that_are_there_while_a_module_is_called():
    """Both models' are, until the loss is made."""
    hidden, labels = inputs()
    teacher_hidden = torch.randn(2, 9, HIDDEN)
    student, teacher = (LMHead(HIDDEN, VOCAB, bias=False) for _ in range(2))
    w, v = (gather_when_called(head) for head in (student, teacher))
    made = lm_jsd(student, hidden, teacher, teacher_hidden, labels=labels)
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(made, linear_jsd(hidden, w, teacher_hidden, v, target=following))
    assert student.weight.numel() == teacher.weight.numel() == 0
