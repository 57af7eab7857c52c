"""A tiny Llama of transformers, a batch for it, and what must be the same as without the patch."""

import torch
import transformers

from onchip.integrations.transformers import patch, unpatch

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def llama(**config):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | config))


def softcapped():
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**TINY, final_logit_softcapping=5.0))


def batch(rows=2, size=12):
    ids = torch.randint(3, 97, (rows, size), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def of_labels(model):
    """The model's own loss."""
    return model(**batch()).loss


def step(model, loss=of_labels):
    """The loss, and the gradients that there are."""
    model.zero_grad()
    torch.manual_seed(3)
    made = loss(model)
    made.backward()
    return [made.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_close(found, expected, bound=1e-5):
    """By norms; some gradients are nothing but roundings, so a thousandth of the norm of all counts too."""
    assert len(found) == len(expected) > 0
    torch.testing.assert_close(found[0], expected[0], rtol=bound, atol=bound)
    norm = sum(g.double().norm().square() for g in expected[1:]) ** 0.5
    for p, q in zip(found[1:], expected[1:], strict=True):
        assert (p.double() - q.double()).norm() <= bound * (q.double().norm() + norm / 1000)


def assert_unchanged(model, loss=of_labels, losses=1, bound=1e-5, **options):
    """A patched step is that of the model, with no logits stored, and unpatching leaves nothing."""
    expected = step(model, loss)
    before = [(type(module), set(vars(module))) for module in model.modules()]
    report = patch(model, **options)
    assert_close(step(model, loss), expected, bound)
    assert (report.fused, report.losses, report.materialized) == (True, losses, {})
    unpatch(model)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before


class Data(torch.utils.data.Dataset):
    """For a Trainer: sequences with labels from some place on."""

    def __init__(self, number=16, size=12, vocab=97):
        self.number, self.size, self.vocab = number, size, vocab

    def __len__(self):
        return self.number

    def __getitem__(self, i):
        ids = torch.randint(3, self.vocab, (self.size,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(self.size) < i % 7, -100)}


def trained(model, folder, data=None, steps=3, loss=None, metrics=None, **args):
    """A Trainer after a few steps, and the losses that it logged."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, logging_steps=1, report_to=[], seed=0,
        save_strategy="no", learning_rate=1e-2, disable_tqdm=True, **args,
    )  # fmt: skip
    data = data or Data()
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, compute_metrics=metrics,
        compute_loss_func=loss,
    )  # fmt: skip
    trainer.train()
    return trainer, [x["loss"] for x in trainer.state.log_history if "loss" in x]
