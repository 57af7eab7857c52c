"""Times whole training steps of transformers' models with several losses.

    python tools/training_step.py [--model PATTERN] [--loss PATTERN] [--rounds N] [--out RESULTS.json]

The models are random, in bfloat16, with gradient checkpointing and AdamW; some have PEFT's LoRA of rank 16.  The losses
are transformers' own, Liger's patch of the loss alone, and onchip's patch with its default scratch memory and with
less.  They run one after the other from the same weights with the same batch; their losses after as many steps are
reported with their times.

A packed run has documents of mixed lengths, different ones in each step, and onchip's patch with several kinds of
attention.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.integrations import transformers as onchip_transformers

LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0}
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
BODY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Run(NamedTuple):
    """A model and what it is trained on."""

    name: str
    kind: str  # transformers' type of model
    sizes: Mapping[str, Any]  # of its config
    shape: tuple[int, int]  # batch and sequence
    steps: int  # that are timed
    lora: list[str] | None = None  # its layers; None: all weights train
    length: int | None = None  # of documents on average; None: a row is one


RUNS = (
    Run("Llama 1B, 4 x 4096", "llama", LLAMA, (4, 4096), 6),
    Run("Qwen3 0.6B, 4 x 4096", "qwen3", QWEN3, (4, 4096), 6),
    Run("Qwen3 0.6B, 8 x 8192", "qwen3", QWEN3, (8, 8192), 3),
    Run("Llama 1B, 4 x 4096, LoRA", "llama", LLAMA, (4, 4096), 6, BODY),
    Run("Llama 1B, 4 x 4096, LoRA with the head", "llama", LLAMA, (4, 4096), 6, [*BODY, "lm_head"]),
    Run("Llama 1B, packed, 1 x 16384", "llama", LLAMA, (1, 16384), 4, length=1024),
)


def default(model: Any) -> None:
    pass


def by_onchip(model: Any, scratch: str | None = None) -> None:
    assert onchip_transformers.patch(model, scratch_bytes=scratch).fused


def by_liger(model: Any) -> None:
    from liger_kernel.transformers import monkey_patch

    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    patch = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
    patch(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, model=model)


def with_attention(model: Any, name: str) -> None:
    by_onchip(model)
    onchip_transformers.register_attention()
    model.set_attn_implementation(name)


LOSSES: dict[str, Callable[[Any], None]] = {
    "onchip's patch": by_onchip,
    "onchip's patch, 256 MiB": partial(by_onchip, scratch="256MiB"),
    "Liger's patch": by_liger,
    "default loss": default,
}
ATTENTIONS: dict[str, Callable[[Any], None]] = {
    f"onchip's patch, {name}": partial(with_attention, name=name)
    for name in ("onchip", "flash_attention_4", "flex_attention", "sdpa", "eager")
}


def batch(run: Run, step: int, attention: str) -> dict[str, Any]:
    """What a model is called with.  Labels of a document's first token are ignored: no other document predicts it.
    Flash-attention is told where documents begin: the length that transformers finds itself is a tensor, which
    flash-attn-4 doesn't take."""
    rng = torch.Generator().manual_seed(step if run.length else 0)
    rows, tokens = run.shape
    ids = torch.randint(run.sizes["vocab_size"], run.shape, generator=rng)
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if run.length:
        lengths = torch.randn(rows, tokens, generator=rng).mul(1.2).exp() * (run.length / 2)
        begins = torch.zeros(rows, tokens + 1, dtype=torch.bool)
        begins.scatter_(1, lengths.long().add(1).cumsum(1).clamp(max=tokens), True)[:, 0] = True
        at = torch.arange(tokens)
        first = torch.where(begins[:, :-1], at, 0).cummax(1).values
        given |= {"position_ids": at - first, "labels": ids.masked_fill(first == at, -100)}
        if attention.startswith("flash"):
            starts = torch.cat([(first == at).flatten().nonzero()[:, 0], torch.tensor([rows * tokens])]).int()
            longest = int(starts.diff().max())
            given |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
            given |= {"max_length_q": longest, "max_length_k": longest}
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}


def measured(model: Any, run: Run) -> dict[str, Any]:
    """Milliseconds of a step, GiB of the peak, and the last loss; the first two steps are left out of the times."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    times: list[float] = []
    for i in range(2 + run.steps):
        given = batch(run, i, model.config._attn_implementation)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if i == 1:
            torch.cuda.reset_peak_memory_stats()
        begin.record()
        value = model(**given, use_cache=False).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        print(f"  step {i + 1} of {2 + run.steps}: {times[-1]:.0f} ms", file=sys.stderr, flush=True)
    ms = sorted(times[2:])
    peak = torch.cuda.max_memory_allocated() / 2**30
    found = {"median_ms": statistics.median(ms), "least_ms": ms[0], "peak_gib": peak, "last_loss": value.item()}
    return found | {"first_steps_ms": times[:2]}


def made(kind: str, sizes: Mapping[str, Any], lora: list[str] | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=16, target_modules=lora))
    return model.train()


def rows(models: str, losses: str, rounds: int) -> Iterator[dict[str, Any]]:
    """In each round, all losses of a model one after the other."""
    for run in (run for run in RUNS if fnmatch(run.name, models)):
        ways = ATTENTIONS if run.length else LOSSES
        for loss_name, patch in rounds * [pair for pair in ways.items() if fnmatch(pair[0], losses)]:
            model = made(run.kind, run.sizes, run.lora)
            try:
                patch(model)
                found = measured(model, run)
            except Exception as error:  # out of memory, mostly
                found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            del model
            gc.collect()
            torch.cuda.empty_cache()
            yield {"model": run.name, "loss": loss_name, **found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="*", help="a pattern for names in RUNS")
    parser.add_argument("--loss", default="*", help="a pattern for names in LOSSES; for a packed run, in ATTENTIONS")
    parser.add_argument("--rounds", type=int, default=1, help="how many times each loss runs (default: 1)")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    given = parser.parse_args()
    found = []
    for row in rows(given.model, given.loss, given.rounds):
        found.append(row)
        print(json.dumps(row), flush=True)
        if given.out is not None:
            names = [x for x in ("torch", "transformers", "liger_kernel", "peft") if find_spec(x)]
            versions = {name: version(name) for name in names}
            environment = {"gpu": torch.cuda.get_device_name(), **versions}
            document = {"environment": environment, "rows": found}
            given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
