"""Megatron-LM: its GPTModel."""

import contextlib
from typing import Any

import torch
from stacks.common import Checked, agreed, gradients, tokens


def megatron() -> Checked:
    # Megatron asks for the GPU's index and its random state where neither is used.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from onchip.integrations.megatron import output_processor

    tensor_parallel.get_cuda_rng_tracker().fork = lambda *names: contextlib.nullcontext()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    made: list[list[Any]] = []
    for extra in ({"output_processor": output_processor}, {}):
        made.append([])
        for tied in (True, False):
            torch.manual_seed(0)
            spec = get_gpt_layer_local_spec()
            model = GPTModel(config, spec, 96, 16, share_embeddings_and_output_weights=tied)
            positions = torch.arange(16).expand(2, -1)
            mask = torch.ones(2, 1, 16, 16).triu(1).bool()
            losses = model(tokens(), positions, mask, labels=tokens(), **extra)
            losses.mean().backward()
            made[-1] += [losses.detach(), *gradients(model)]
    how = f"a GPTModel's losses and gradients with it and without, tied head and not: {agreed(*made):.0e}"
    return "`GPTModel.forward(output_processor=)`", how
