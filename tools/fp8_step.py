"""Times whole models' steps with FP8 layers and in bfloat16: python tools/fp8_step.py [RESULTS.json]

The models are random decoders of transformers without a head, forward and backward, in bfloat16 with and without
`convert_linears`, eager and with each layer compiled; with micro-batches also inside `weights_unchanged`.  Before that
it measures how long the host takes for one layer's forward, and the losses of 300 steps of a small decoder.
"""

import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from onchip.torch import Fp8Linear, convert_linears, linear_cross_entropy, weights_unchanged

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "head_dim": 128}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 8, "head_dim": 64}
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128}
# Name, type, config, batch and sequence, gradient checkpointing, micro-batches.
RUNS = (
    ("4 layers of Llama 3.1 8B, 1 x 8192", "llama", LLAMA_8B, (1, 8192), False, 1),
    ("4 layers of Llama 3.1 8B, 4 x 1 x 2048", "llama", LLAMA_8B, (1, 2048), False, 4),
    ("Llama 1B, 4 x 4096, checkpointing", "llama", LLAMA_1B, (4, 4096), True, 1),
    ("Qwen3 0.6B, 4 x 4096, checkpointing", "qwen3", QWEN3, (4, 4096), True, 1),
)
STEPS = 10


def decoder(kind: str, sizes: Mapping[str, Any], checkpointing: bool, fp8: bool) -> Any:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, vocab_size=1024, use_cache=False)
    with torch.device("cuda"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if fp8:
        convert_linears(model)
    return model.train()


def measured(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds that a step takes the device, and that the host takes to launch one."""
    for _ in range(3):
        step()
    device, host = [], []
    for _ in range(STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        start = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - start))
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end))
    return {"ms": statistics.median(device), "least_ms": min(device), "host_ms": statistics.median(host)}


def take(model: Any, ids: Any, upstream: Any, batches: int, unchanged: Callable[[], Any]) -> None:
    with unchanged():
        for _ in range(batches):
            model(input_ids=ids).last_hidden_state.backward(upstream)
    model.zero_grad()


def models() -> Iterator[dict[str, Any]]:
    for name, kind, sizes, shape, checkpointing, batches in RUNS:
        for compiled in (False, True):
            for way in ("bfloat16", "fp8", "fp8, weights_unchanged")[: 2 + (batches > 1)]:
                torch._dynamo.reset()
                model = decoder(kind, sizes, checkpointing, way != "bfloat16")
                if compiled:
                    for layer in model.layers:
                        layer.compile(dynamic=False)
                ids = torch.randint(1024, shape, device="cuda")
                upstream = torch.randn((*shape, sizes["hidden_size"]), device="cuda", dtype=torch.bfloat16)
                unchanged = partial(weights_unchanged, model) if "unchanged" in way else contextlib.nullcontext
                step = partial(take, model, ids, upstream, batches, unchanged)
                yield {"model": name, "compiled": compiled, "layers": way, **measured(step)}
                del model, step
                gc.collect()
                torch.cuda.empty_cache()


def layer() -> Iterator[dict[str, Any]]:
    """The host's time for the forward pass of one small layer; the device follows without waiting."""
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for name, made in {"nn.Linear": torch.nn.Linear, "Fp8Linear": Fp8Linear}.items():
        one = made(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
        times = []
        for _ in range(300):
            start = time.perf_counter()
            one(x)
            times.append(1e6 * (time.perf_counter() - start))
            torch.cuda.synchronize()
        yield {"layer": name, "host_us_of_forward": statistics.median(times)}


def curves(steps: int = 300) -> Iterator[dict[str, Any]]:
    """The losses of the same decoder on the same batches, from a sequence that can be learnt."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 8, "head_dim": 64}
    generator = torch.Generator("cuda").manual_seed(1)
    table = torch.randint(1024, (1024, 2), device="cuda", generator=generator)
    for way in ("bfloat16", "fp8"):
        torch.manual_seed(0)
        model = decoder("llama", sizes, False, way == "fp8")
        head = model.embed_tokens.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        choice = torch.Generator("cuda").manual_seed(2)
        losses = []
        for _ in range(steps):
            ids = [torch.randint(1024, (16,), device="cuda", generator=choice)]
            for _ in range(128):  # each token has two that may follow
                ids.append(table[ids[-1], torch.randint(2, (16,), device="cuda", generator=choice)])
            batch = torch.stack(ids, 1)
            loss = linear_cross_entropy(model(input_ids=batch).last_hidden_state, head, batch, shift=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        yield {"curve": way, "losses": [round(x, 4) for x in torch.stack(losses).tolist()[9::10]]}


if __name__ == "__main__":
    found = []
    for part in (layer, curves, models):
        for row in part():
            found.append(row)
            print(json.dumps(row), flush=True)
            if len(sys.argv) > 1:
                versions = {name: version(name) for name in ("torch", "transformers")}
                document = {"environment": {"gpu": torch.cuda.get_device_name(), **versions}, "rows": found}
                Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
