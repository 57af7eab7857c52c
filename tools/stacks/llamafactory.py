"""LLaMA-Factory: its kernel plugin."""

import importlib
import types

from stacks.common import Checked, agreed, gradients, llama, tokens


def llamafactory() -> Checked:
    from llamafactory.v1.core.base_trainer import BaseTrainer
    from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin

    importlib.import_module("onchip.integrations.llamafactory")
    made = []
    trainer = types.SimpleNamespace(device="cpu")
    for kernels in ("auto", None):
        model = KernelPlugin("onchip")(model=llama(), include_kernels=kernels).train()
        log_probs = BaseTrainer.compute_log_probs(trainer, model, {"input_ids": tokens(), "labels": tokens()})
        (-log_probs).mean().backward()
        made.append([log_probs.detach(), *gradients(model)])
        if kernels and model.__dict__["_onchip"].report.materialized:
            raise AssertionError(str(model.__dict__["_onchip"].report))
    how = f"`BaseTrainer.compute_log_probs` of a Llama with and without, values and gradients: {agreed(*made):.0e}"
    return '`KernelPlugin("onchip")`', how
