"""transformers: the experts of its mixture-of-experts models by `grouped_matmul`."""

from typing import Any

from torch import Tensor, nn

from onchip.core.machine import naming_extra
from onchip.ops.grouped_matmul.torch_moe import group, moe_forward

NAME = "onchip"


def register_experts() -> None:
    """Add "onchip" to the expert implementations of transformers.

    A model takes it with `experts_implementation="onchip"` in from_pretrained or from_config, or with
    `model.set_experts_implementation("onchip")`.  The products of each layer's experts are then two calls of
    `grouped_matmul`: the first gathers the tokens and computes SwiGLU, the second multiplies by the router's weights
    and adds up.  Weights, biases and layouts stay as they are in the model; an activation that isn't plain SwiGLU
    (gpt-oss) is the model's own, between the two calls.  An id that belongs to no expert here, as under expert
    parallelism, costs nothing and adds nothing.

    Call it once in each process, before a model asks for it.

    Raises:
        ImportError: transformers isn't installed, or has no `transformers.integrations.moe` (before 5).

    Example:
        >>> import torch
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> from onchip.integrations.transformers import register_experts
        >>> register_experts()
        >>> config = MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = MixtralForCausalLM(config)
        >>> model.set_experts_implementation("onchip")
        >>> ids = torch.randint(64, (2, 8))
        >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    with naming_extra("onchip.integrations.transformers", "torch,integrations"):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that `register_experts` registers, for modules decorated with `use_experts_implementation`.

    Args:
        self: the module.
        hidden_states: [T, H].
        top_k_index: [T, top_k] expert ids; an id of num_experts or more belongs to no expert.
        top_k_weights: [T, top_k].

    Raises:
        NotImplementedError: the experts end in a norm.
    """
    if getattr(self, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"onchip.integrations.transformers: {type(self).__name__} has a norm between each expert and the router's "
            "weights; use experts_implementation='grouped_mm' or 'eager'"
        )
    widening, bias = ("gate_up_proj", "gate_up_proj_bias") if self.has_gate else ("up_proj", "up_proj_bias")
    weight = getattr(self, widening)
    gate = None if _is_swiglu(self) else self._apply_gate if self.has_gate else self.act_fn
    y = moe_forward(
        hidden_states,
        group(top_k_index, weight.shape[0]),
        top_k_weights,
        weight,
        self.down_proj,
        widening_bias=getattr(self, bias) if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        weight_layout="gkn" if self.is_transposed else "gnk",
        activation=gate,
    )
    return y.to(hidden_states.dtype)


def _is_swiglu(experts: Any) -> bool:
    """Whether the activation is silu(gate) * up, gate before up: transformers' own gating, with SiLU."""
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    own = "_apply_gate" in vars(experts) or type(experts)._apply_gate is not moe._default_apply_gate
    return bool(experts.has_gate) and not own and isinstance(experts.act_fn, (nn.SiLU, SiLUActivation))
