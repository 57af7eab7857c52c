"""torchtitan: its loss, its experts, and its Trainer on two processes."""

import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from stacks.common import Checked, agreed, gradients, run_examples, tokens
from torch import nn


def torchtitan() -> Checked:
    # torchtitan looks for an accelerator, and for a function of PyTorch after 2.13.
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment,return-value]
    torch.distributed.set_timeout = lambda *given: None  # type: ignore[attr-defined]
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from onchip.integrations.torchtitan import (
        GroupedMatmulConverter,
        LinearCrossEntropyLoss,
        OnchipAttention,
        TitanFp8Linear,
    )

    def step(config: Any) -> list[Any]:
        torch.manual_seed(0)
        body, head = (Linear.Config(in_features=32, out_features=size).build() for size in (32, 96))
        loss = config.build()
        loss.set_lm_head(head)
        hidden, labels = torch.randn(2, 16, 32), tokens().index_fill(1, torch.tensor([3]), -100)
        with torch.no_grad():
            made = [loss(body(hidden), labels)[0]]
        for _ in range(2):  # gradients add up
            made.append(loss(body(hidden), labels, torch.tensor(30))[0])
            made[-1].backward()
        return [x.detach() for x in made] + gradients(body) + gradients(head)

    def experts(converted: bool) -> list[Any]:
        config = GroupedExperts.Config(dim=32, hidden_dim=48, num_experts=4)
        if converted:
            config = GroupedMatmulConverter.Config().build().convert(config)
        torch.manual_seed(0)
        made = config.build()
        for p in made.parameters():
            nn.init.normal_(p, std=0.2)
        x = torch.randn(40, 32, requires_grad=True)
        y = made(x, torch.tensor([8, 0, 16, 16]))
        y.square().sum().backward()
        return [y.detach(), x.grad, *gradients(made)]

    alone = agreed(step(LinearCrossEntropyLoss.Config()), step(ChunkedLossWrapper.Config()))
    rounded = agreed(experts(True), experts(False), bound=1e-2)  # in bfloat16
    defined = run_examples("torchtitan.md", "torchtitan")
    torch.distributed.init_process_group("gloo")  # once, for all its trainers
    torch.distributed.init_process_group = lambda **given: None
    theirs, _ = titan_steps(llama3_debugmodel())
    ours, _ = titan_steps(defined["llama3_onchip"]())
    together = agreed(ours, theirs)
    compiled = defined["llama3_onchip"]()
    compiled.compile.enable = True
    together = max(together, agreed(titan_steps(compiled)[0], theirs))
    split = max(
        agreed(titan_steps(tensor_parallel(defined["llama3_onchip"](), sequence))[0],
               titan_steps(tensor_parallel(llama3_debugmodel(), sequence))[0])
        for sequence in (True, False)
    )  # fmt: skip
    chunked = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=97))
    split = max(split, agreed(titan_head(LinearCrossEntropyLoss.Config()), titan_head(chunked)))
    fp8, model = titan_steps(defined["llama3_onchip_fp8"]())
    quantized = agreed(fp8[:3], theirs[:3], bound=1e-3)
    layers = sum(isinstance(module, TitanFp8Linear) for module in model.modules())
    attended, model = titan_steps(defined["llama3_onchip_attention"]())
    attentions = sum(isinstance(module, OnchipAttention) for module in model.modules())
    compiled = defined["llama3_onchip_attention"]()
    compiled.compile.enable = True
    packed = max(agreed(attended, theirs), agreed(titan_steps(compiled)[0], theirs))
    theirs, _ = titan_steps(deepseek_v3_debugmodel())
    mixed, model = titan_steps(defined["deepseek_v3_onchip"]())
    compiled = defined["deepseek_v3_onchip"]()
    compiled.compile.enable = True
    mixture = max(agreed(mixed, theirs), agreed(titan_steps(compiled)[0], theirs, bound=1e-3))
    mixtures = sum(hasattr(module, "onchip_backend") for module in model.modules())
    how = (
        f"the loss and `ChunkedLossWrapper`, loss and gradients: {alone:.0e}; torchtitan's Trainer with FSDP2 on 2 "
        f"processes, 3 steps of Llama 3's debug model, eager and compiled, losses and gradient norms: {together:.0e}; "
        f"with tensor parallelism, and the head alone at `spmd_types`: {split:.0e}; "
        f"with {layers} FP8 layers, losses: {quantized:.0e}; with {attentions} layers of attention, eager and "
        f"compiled: {packed:.0e}; `GroupedExperts` in bfloat16, results and gradients: {rounded:.0e}; 3 such steps of "
        f"DeepSeek-V3's debug model, with {mixtures} layers of experts, eager and compiled: {mixture:.0e}"
    )
    hooked = "`ChunkedLossWrapper`, `ModelConfigConverter`, `GroupedExperts._grouped_mm`, `VarlenAttention`"
    return hooked, how


def tensor_parallel(config: Any, sequence: bool) -> Any:
    """The same on two ranks of tensor parallelism."""
    config.parallelism.tensor_parallel_degree, config.parallelism.enable_sequence_parallel = 2, sequence
    return config


def titan_head(config: Any) -> list[Any]:
    """Loss and gradients of a head that torchtitan's 'spmd_types' shards, without FSDP."""
    import spmd_types as spmd
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
    from torchtitan.models.common.linear import Linear
    from torchtitan.protocols.sharding import ShardingConfig

    set_spmd_backend("spmd_types")
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "pp", "ep"), 1)
    dims = ParallelDims(**ones, tp=2, world_size=2, spmd_backend="spmd_types")
    dims.build_mesh()
    whole, split = (dense_activation_placement(tp=tp) for tp in (spmd.R, spmd.S(-1)))
    sharding = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.S(0))},
        in_src_shardings={"input": whole},
        in_dst_shardings={"input": whole},
        out_src_shardings=split,
        out_dst_shardings=split,
    )
    torch.manual_seed(0)
    hidden, labels = torch.randn(2, 16, 32, requires_grad=True), tokens().index_fill(1, torch.tensor([3]), -100)
    head = Linear.Config(in_features=32, out_features=97, sharding_config=sharding).build()
    head.parallelize(dims)
    loss = config.build()
    loss.set_lm_head(head)
    with set_current_spmd_mesh(dims.get_optional_mesh(["tp"], include_singleton_axes=True)):
        made = loss(hidden, labels, torch.tensor(30))[0]
        made.backward()
    return [made.detach(), hidden.grad, head.weight.grad]


def titan_steps(config: Any) -> tuple[list[float], Any]:
    """Losses and gradient norms of three steps by torchtitan's Trainer, and the model."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.attention import SDPBackend
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import BaseAttention, ScaledDotProductAttention

    from onchip.integrations.torchtitan import OnchipAttention

    class Data(BaseDataLoader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **other: Any) -> None:
            self.shape, self.seed = (local_batch_size, seq_len), dp_rank

        def __iter__(self) -> Iterator[Any]:
            generator = torch.Generator().manual_seed(self.seed)
            while True:
                ids = torch.randint(2000, self.shape, generator=generator)
                labels = ids.roll(-1, 1)
                labels[:, : 1 + self.seed] = -100
                yield {"input": ids, "positions": torch.arange(self.shape[1]).expand(self.shape)}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Config, **other: Any) -> None:
            pass

        encode = decode = get_vocab_size = None

    memory = metrics.DeviceMemStats(*[0.0] * len(metrics.DeviceMemStats._fields))
    metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(
        device_name="CPU", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None
    )
    # Its flex attention has no gradient on the CPU.
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.MATH]
    for _, attention, _, _ in config.model_spec.model.traverse(BaseAttention.Config):
        if not isinstance(attention.inner_attention, OnchipAttention.Config):
            attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader, config.tokenizer = Data.Config(), NoTokenizer.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 32, 3
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # FSDP2 of PyTorch 2.13 refuses the parameters of 'spmd_types'
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed = 0
    logged: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder = folder
        trainer = config.build()
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
        trainer.metrics_processor.log = lambda step, loss, largest, norm, **other: logged.append([loss, norm])
        trainer.train()
        trainer.close()
    losses, norms = zip(*logged, strict=True)
    return [*losses, *norms], trainer.model_parts[0]
