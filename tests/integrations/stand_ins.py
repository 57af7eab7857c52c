"""What stands in for stacks that aren't installed here: their versions, and torchtitan's classes as far as needed."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

DISTRIBUTIONS = {
    "axolotl": ("axolotl", "0.19"),
    "llamafactory": ("llamafactory", "0.9.5"),
    "maxtext": ("maxtext", "0.2.5"),
    "nemo": ("nemo-automodel", "0.7"),
    "torchtitan": ("torchtitan", "0.3"),
    "verl": ("verl", "0.9"),
}


def refused(error, message, call, *given, **named):
    with pytest.raises(error, match=message):
        call(*given, **named)


class TitanLoss:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


class TitanLinear(nn.Linear):
    @dataclass(kw_only=True, slots=True)
    class Config:
        in_features: int
        out_features: int
        bias: bool = False


class TitanConverter:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


class TitanExperts(nn.Module):
    """As torchtitan 0.3.0's, without DTensors."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dim: int
        hidden_dim: int
        num_experts: int

    def __init_subclass__(cls):
        cls.Config._owner = cls

    def __init__(self, config):
        super().__init__()
        wide, narrow = (
            (config.num_experts, config.hidden_dim, config.dim),
            (config.num_experts, config.dim, config.hidden_dim),
        )
        self.w1, self.w2, self.w3 = (nn.Parameter(0.2 * torch.randn(shape)) for shape in (wide, narrow, wide))

    def forward(self, x, num_tokens_per_expert):
        offsets = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        h = F.silu(self._grouped_mm(A=x.bfloat16(), B_t=w1, offs=offsets))
        h = h * self._grouped_mm(A=x.bfloat16(), B_t=w3, offs=offsets)
        return self._grouped_mm(A=h, B_t=w2, offs=offsets).type_as(x)

    def _grouped_mm(self, *, A, B_t, offs):
        ends = [0, *offs.tolist()]
        return torch.cat([A[i:j] @ w for i, j, w in zip(ends, ends[1:], B_t, strict=False)])


TitanExperts.Config._owner = TitanExperts


class TitanVarlen(nn.Module):
    """As torchtitan's VarlenAttention, whose kernel runs on GPUs alone."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config):
        raise AssertionError  # it loads flash-attention


class TitanVarlenMetadata(NamedTuple):
    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
