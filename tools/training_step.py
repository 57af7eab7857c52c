"""Times whole training steps of transformers' models with three losses: python tools/training_step.py [RESULTS.json]

Random models, bfloat16, gradient checkpointing, AdamW.  The losses are transformers' own, Liger's patch of the loss
alone, and `linear_cross_entropy` on the hidden states of the model's base, one after the other from the same weights
with the same batch: their losses after as many steps stand beside their times.
"""

import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.torch import linear_cross_entropy

LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0}
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
# Name, transformers' model type, its config, batch and sequence, timed steps.
RUNS = (
    ("Llama 1B, 4 x 4096", "llama", LLAMA, (4, 4096), 6),
    ("Qwen3 0.6B, 4 x 4096", "qwen3", QWEN3, (4, 4096), 6),
    ("Qwen3 0.6B, 8 x 8192", "qwen3", QWEN3, (8, 8192), 4),
)
Loss = Callable[[Any, Tensor], Tensor]
"""Of a model and the ids of a batch."""


def default(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = type(model).forward(model, input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def by_onchip(model: Any, ids: Tensor) -> Tensor:
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    loss: Tensor = linear_cross_entropy(hidden, model.lm_head.weight, labels)
    return loss


def by_liger(model: Any, ids: Tensor) -> Tensor:
    """The patch puts its forward on the model; `default` calls the class's."""
    from liger_kernel.transformers import monkey_patch

    if "forward" not in vars(model):
        patch = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
        patch(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, model=model)
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


LOSSES: dict[str, Loss] = {"onchip by hand": by_onchip, "Liger's patch": by_liger, "default loss": default}


def measured(model: Any, loss: Loss, ids: Tensor, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, GiB of the peak, and the last loss; the first two steps are left out of the times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    times = []
    for i in range(2 + steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if i == 1:
            torch.cuda.reset_peak_memory_stats()
        begin.record()
        value = loss(model, ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    ms = sorted(times[2:])
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"median_ms": statistics.median(ms), "least_ms": ms[0], "peak_gib": peak, "last_loss": value.item()}


def rows() -> Iterator[dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, kind, sizes, shape, steps in RUNS:
        config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=True)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
            ids = torch.randint(config.vocab_size, shape)
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        initial = {key: x.clone() for key, x in model.state_dict().items()}
        for loss_name, loss in LOSSES.items():
            model.load_state_dict(initial)
            try:
                found = measured(model, loss, ids, steps)
            except Exception as error:  # out of memory, mostly
                found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            model.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
            yield {"model": name, "loss": loss_name, **found}
        del model, initial


if __name__ == "__main__":
    found = []
    for row in rows():
        found.append(row)
        print(json.dumps(row), flush=True)
        if len(sys.argv) > 1:
            environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            document = {"environment": environment, "rows": found}
            Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
