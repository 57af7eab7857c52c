"""Hugging Face's libraries: transformers, PEFT, TRL and accelerate."""

import contextlib
import tempfile
from typing import Any

import torch
from stacks.common import Checked, agreed, fused, gradients, llama, tests, tokens


def transformers() -> Checked:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from onchip.integrations.transformers import patch

    rows = [{"input_ids": row, "labels": row} for row in tokens().tolist()] * 8

    def train(patched: bool) -> list[float]:
        model = llama()
        if patched:
            patch(model)
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder, max_steps=3, logging_steps=1, report_to="none", use_cpu=True, gradient_accumulation_steps=2
            )
            trainer = Trainer(model, args, train_dataset=Dataset.from_list(rows))
            with contextlib.redirect_stdout(None):
                trainer.train()
        if patched:
            fused(model)
        return [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]

    error = agreed(train(True), train(False))
    how = f"`Trainer`, 3 steps of a patched Llama, losses and gradient norms: {error:.0e}; {tests('transformers')}"
    return "`model.loss_function`, `lm_head.forward`", how


def peft() -> Checked:
    from peft import LoraConfig, get_peft_model

    from onchip.integrations.transformers import patch

    made = []
    for patched in (True, False):
        config = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(llama(), config)
        if patched:
            patch(model)
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        made.append([loss.detach(), *gradients(model)])
        if patched:
            fused(model.base_model.model)
    how = f"LoRA on `q_proj` and `lm_head`, loss and the adapters' gradients: {agreed(*made):.0e}; {tests('peft')}"
    return "as transformers", how


def trl() -> Checked:
    import trl.trainer.utils as home

    from onchip.integrations import trl as integration

    def step() -> list[Any]:
        torch.manual_seed(0)
        hidden, weight = torch.randn(50, 32, requires_grad=True), torch.randn(96, 32, requires_grad=True)
        given = hidden, weight, None, torch.randint(96, (50,)), 0.7, 16, None, 1.0, ("entropy", "mean_logits")
        log_prob, entropy, _, mean_logits, _ = home._ChunkedLogProbFunction.apply(*given)
        (log_prob.sum() + 0.1 * entropy.sum()).backward()
        return [log_prob.detach(), entropy.detach(), mean_logits, hidden.grad, weight.grad]

    theirs = step()
    installed = integration.install()
    error = agreed(step(), theirs)
    integration.uninstall()
    how = f"its log-probabilities, entropies and their gradients: {error:.0e}; {tests('trl')}"
    return ", ".join(f"`{name.rpartition('.')[2]}`" for name in installed.replaced), how


def accelerate() -> Checked:
    from accelerate import Accelerator

    from onchip.integrations.transformers import patch

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    made = []
    for patched in (True, False):
        model = llama()
        if patched:
            patch(model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens(), labels=tokens()).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        made.append([*losses, *(p.detach() for p in model.parameters())])
        if patched:
            fused(accelerator.unwrap_model(model))
    how = f"`Accelerator`, 4 accumulated steps of a patched Llama, losses and weights: {agreed(*made):.0e}"
    return "as transformers", how
