"""What backend "symmetric" says where it can't run; test_cm_symmetric_gpu.py has its walks."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from onchip.collectives import torch_symmetric as symmetric
from onchip.collectives.torch_ring import Ring


def test_what_it_refuses():
    ring = Ring("any", 0, 2)
    cuda = torch.device("cuda", 0)
    assert symmetric.refusal(ring, torch.device("cpu"), torch.bfloat16) == "it runs on CUDA tensors, not on 'cpu'"
    said = symmetric.refusal(ring, cuda, torch.float32)
    assert said == "it takes bfloat16 and float16, not float32; pass backend='ring'"
    many = ring._replace(ranks=129)
    assert symmetric.refusal(many, cuda, torch.bfloat16) == "it takes up to 128 ranks, not 129"
    with mock.patch.object(symmetric, "device_refusal", return_value="it needs compute capability 8.0"):
        assert symmetric.refusal(ring, cuda, torch.bfloat16) == "it needs compute capability 8.0"
    for found, reason in (
        ("CUDA", None),
        (
            "NVSHMEM",
            "it needs symmetric memory of PyTorch's allocator 'CUDA', and this is 'NVSHMEM'; pass backend='ring'",
        ),
    ):
        with (
            mock.patch.object(symmetric, "device_refusal", return_value=None),
            mock.patch("torch.distributed._symmetric_memory.get_backend", return_value=found),
        ):
            assert symmetric.refusal(ring, cuda, torch.float16) == reason


def test_memory_that_ranks_cannot_map(monkeypatch):
    """PyTorch's reason is in the error, and its variable is as it was."""
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ring = Ring(dist.group.WORLD.group_name, 0, 1)
        with pytest.raises(ValueError, match=r"'symmetric' needs GPUs of one host .*; PyTorch says of these: \S"):
            symmetric._buffer(ring, torch.device("cpu", 0), 100)
        assert not symmetric._BUFFERS[dist.group.WORLD]
        symmetric.free_buffers()
        assert dist.group.WORLD not in symmetric._BUFFERS
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(
                ValueError, match="makes its buffers in the first call of a size, which a CUDA graph can't"
            ):
                symmetric._buffer(ring, torch.device("cpu", 0), 100)
    finally:
        dist.destroy_process_group()
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ
