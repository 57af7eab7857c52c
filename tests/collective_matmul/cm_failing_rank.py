"""A rank that fails while others are in a call (torchrun, a CUDA device for each rank)."""

import os
import sys

import torch
import torch.distributed as dist

from onchip.torch import all_gather_matmul, linear_cross_entropy


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    x, weight = (torch.ones(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    target = torch.zeros(256, device="cuda", dtype=torch.int64)
    for step in range(2):
        if step == 1 and rank == 1:
            sys.exit("this rank fails")
        if sys.argv[1] == "linear_cross_entropy":
            made = linear_cross_entropy(x, weight, target, vocab_group=dist.group.WORLD)
        else:
            made = all_gather_matmul(x, weight, None, backend=sys.argv[1]).sum()
        made.backward()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
