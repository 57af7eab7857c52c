"""transformers.Trainer with FSDP2, with a patched model and without (torchrun, a CUDA device for each rank).

two_processes.py tests FSDP1 and FSDP2 themselves, on the CPU; accelerate, which Trainer uses, needs an accelerator.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import transformers
from tiny import Data, trained
from torch.distributed.tensor import DTensor

from onchip.integrations.transformers import patch

MODEL = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def train(patched, *, bf16, tied):
    """The losses of four steps, and norms of the weights after them."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL, tie_word_embeddings=tied))
    report = patch(model) if patched else None
    with tempfile.TemporaryDirectory() as folder:
        trainer, losses = trained(
            model, folder, Data(32, 48, MODEL["vocab_size"]), steps=4, gradient_accumulation_steps=2, bf16=bf16,
            fsdp="full_shard", fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        )  # fmt: skip
    weights = [w for w in trainer.model_wrapped.parameters() if w.requires_grad]
    assert all(isinstance(w, DTensor) for w in weights), "nothing is sharded"
    assert report is None or (report.losses == 8 and not report.materialized), report
    return torch.tensor(losses), torch.stack([w.full_tensor().float().norm() for w in weights])


def main():
    warnings.simplefilter("ignore")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    failed = []
    for bf16 in (False, True):
        for tied in (False, True):
            losses, norms = train(True, bf16=bf16, tied=tied)
            expected, expected_norms = train(False, bf16=bf16, tied=tied)
            print(f"rank {rank}, bf16={bf16}, tied={tied}: {losses.tolist()}, unpatched {expected.tolist()}")
            # Trainer rounds losses to bfloat16, and Adam divides gradients of any size by their own.
            pairs = [(losses, expected, 5e-3)] if bf16 else [(losses, expected, 1e-5), (norms, expected_norms, 1e-4)]
            for a, b, tolerance in pairs:
                if not torch.allclose(a, b, rtol=tolerance):
                    failed.append(f"bf16={bf16}, tied={tied}: {a} {b}")
    dist.destroy_process_group()
    sys.exit("; ".join(failed) or None)


if __name__ == "__main__":
    main()
