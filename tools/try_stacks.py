"""The table of docs/guides/stacks.md: each integration against its real stack, on the CPU.

    python tools/try_stacks.py FOLDER

FOLDER has a folder for each stack, and one for what they import:

    pip install --no-deps --target FOLDER/torchtitan torchtitan==0.3.0
    pip install --no-deps --target FOLDER/verl verl==0.9.1
    pip install --no-deps --target FOLDER/axolotl axolotl==0.19.0
    pip install --no-deps --target FOLDER/nemo nemo-automodel==0.7.0
    pip install --no-deps --target FOLDER/llamafactory llamafactory==0.9.5
    git clone https://github.com/NVIDIA/Megatron-LM FOLDER/megatron
    pip install --no-deps --target FOLDER/deps spmd_types==0.2.3 tyro docstring_parser typeguard einops torchdata \
        torch_checkpointing tensorboard addict
"""

import contextlib
import copy
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Row = tuple[str, str, str]  # version, what is hooked, tested how
BOUND = 1e-5  # of the relative error in float32


def main() -> None:
    if sys.argv[1] in STACKS:
        print("|".join(("", f" {sys.argv[1]} ", *(f" {cell} " for cell in STACKS[sys.argv[1]]()), "")))
        return
    folder = Path(sys.argv[1]).resolve()
    print("| stack | version | what is hooked | tested how |\n|---|---|---|---|")
    for name, function in STACKS.items():
        paths = [str(folder / function.__name__), str(folder / "deps"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-W", "ignore", __file__, name]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        rows = [line for line in ran.stdout.splitlines() if line.startswith(f"| {name} ")]
        print(rows[0] if ran.returncode == 0 else f"| {name} | | failed | {ran.stderr.strip().splitlines()[-1]} |")


def agreed(made: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """The largest relative error; raise if it is above the bound."""
    pairs = zip(made, expected, strict=True)
    error = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
    if not error < BOUND:
        raise AssertionError(f"the relative error is {error:.1e}")
    return f"relative error at most {error:.0e} in float32"


def gradients(model: nn.Module) -> list[Tensor]:
    found: list[Any] = [p.grad for p in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


def one_process() -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29617", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo")


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, **size, **settings))


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(96, (2, 16))


# ------------------------------------------------------------------------------------------------------------- stacks


def torchtitan() -> Row:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.models.llama3 import model_registry

    from onchip.integrations.torchtitan import Fp8LinearConverter, LinearCrossEntropyLoss, TitanFp8Linear

    one_process()
    mesh = init_device_mesh("cpu", (1,))

    def step(config: Any, shard: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Body(32, 96)
        if shard:
            fully_shard([model.norm, model.lm_head], mesh=mesh)  # as torchtitan groups them
            fully_shard(model, mesh=mesh)
        loss = config.build()
        loss.set_lm_head(model.lm_head)
        hidden, labels = torch.randn(2, 16, 32), tokens().index_fill(1, torch.tensor([3]), -100)
        with torch.no_grad():
            made = [loss(model(hidden), labels)[0]]
        for _ in range(2):  # gradients add up
            made.append(loss(model(hidden), labels, torch.tensor(30))[0])
            made[-1].backward()
        return [x.detach() for x in made] + gradients(model)

    errors = [
        agreed(step(LinearCrossEntropyLoss.Config(), shard), step(ChunkedLossWrapper.Config(), shard))
        for shard in (False, True)
    ]
    with torch.device("meta"):
        converted = model_registry("debugmodel", converters=[Fp8LinearConverter.Config()]).model.build()
    converted.verify_module_protocol()
    layers = sum(isinstance(module, TitanFp8Linear) for module in converted.modules())
    how = (
        f"`LinearCrossEntropyLoss` and `ChunkedLossWrapper`, losses and gradients: {errors[0]}; under FSDP2 in one "
        f"process {errors[1]}. `Fp8LinearConverter` made {layers} layers of Llama 3's debug model"
    )
    return importlib.metadata.version("torchtitan"), "`ChunkedLossWrapper`, `ModelConfigConverter`", how


class Body(nn.Module):
    """A model without its head's call, as torchtitan's with `_skip_lm_head`."""

    def __init__(self, hidden: int, vocab: int) -> None:
        from torchtitan.models.common.linear import Linear

        super().__init__()
        self.norm = Linear.Config(in_features=hidden, out_features=hidden).build()
        self.lm_head = Linear.Config(in_features=hidden, out_features=vocab).build()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


def verl() -> Row:
    # The package imports Ray; what is replaced here doesn't.
    for name in ("verl", "verl.utils"):
        module = types.ModuleType(name)
        spec = importlib.util.find_spec("verl") if name == "verl" else None
        places = spec.submodule_search_locations if spec else [f"{sys.modules['verl'].__path__[0]}/utils"]
        module.__path__ = list(places or [])
        sys.modules[name] = module
    import verl.utils.experimental.torch_functional as home

    from onchip.integrations import verl as integration

    theirs = home.FusedLinearForPPO
    installed = integration.install()

    def step(made_by: Any) -> list[Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(2, 600, 32, requires_grad=True)
        weight = torch.randn(96, 32, requires_grad=True)
        out = made_by(hidden, weight, torch.randint(96, (2, 600)))
        sum((x * torch.randn_like(x)).sum() for x in out).backward()
        return [*(x.detach().flatten() for x in out), hidden.grad, weight.grad]  # type: ignore[list-item]

    expected = step(lambda h, w, ids: theirs()(h, w, ids, temperature=0.7))
    module = agreed(step(lambda h, w, ids: home.FusedLinearForPPO()(h, w, ids, temperature=0.7)), expected)
    function = sys.modules["verl.utils.kernel.linear_cross_entropy"].linear_cross_entropy
    flat = agreed(step(lambda h, w, ids: function(h, w, ids, 0.7, "none")), expected)
    integration.uninstall()
    if home.FusedLinearForPPO is not theirs:
        raise AssertionError("uninstall left onchip's")
    how = (
        f"verl's `FusedLinearForPPO` with onchip and without, values and gradients: {module}; its function against the "
        f"same: {flat} (verl's own needs a GPU). Without Ray: of the package only these modules are imported"
    )
    return installed.version, ", ".join(f"`{name.rpartition('.')[2]}`" for name in installed.replaced), how


def axolotl() -> Row:
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    manager = PluginManager.get_instance()
    manager.register("onchip.integrations.axolotl.OnchipPlugin")
    fields = merge_input_args()[1].model_fields
    model, ids = llama(), tokens()
    plain = copy.deepcopy(model)
    manager.post_model_build(DictDefault({"onchip_z_loss": 0.0}), model)
    for x in (model, plain):
        x(input_ids=ids, labels=ids).loss.backward()
    error = agreed(gradients(model), gradients(plain))
    report = model.__dict__["_onchip"].report
    if report.losses != 1 or report.materialized:
        raise AssertionError(str(report))
    options = sum(name.startswith("onchip") for name in fields)
    how = f"axolotl's PluginManager patched a Llama, gradients: {error}; its config class took the {options} options"
    return importlib.metadata.version("axolotl"), "`BasePlugin.post_model_build`, `get_input_args`", how


def nemo() -> Row:
    from nemo_automodel.components.loss.loss import build_loss_module
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.components.loss.utils import calculate_loss

    from onchip.integrations.nemo import OnchipCrossEntropy

    labels = tokens().index_fill(1, torch.tensor([3]), -100)
    made = []
    for loss_fn in (build_loss_module(OnchipCrossEntropy), MaskedCrossEntropy()):
        model = llama()
        out = model(input_ids=tokens(), output_hidden_states=True)
        loss = calculate_loss(
            loss_fn,
            model=model,
            logits=out.logits,
            labels=labels,
            hidden_states=out.hidden_states[-1],
            num_label_tokens=30,
        )
        loss.backward()
        made.append([loss.detach(), *gradients(model)])
    how = f"Automodel's `calculate_loss` with it and with `MaskedCrossEntropy` on a Llama, loss and gradients: {agreed(*made)}"
    return importlib.metadata.version("nemo-automodel"), "`ChunkedCrossEntropy` (of `LinearCrossEntropy`)", how


def llamafactory() -> Row:
    from llamafactory.v1.core.base_trainer import BaseTrainer
    from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin

    importlib.import_module("onchip.integrations.llamafactory")
    made = []
    trainer = types.SimpleNamespace(device="cpu")
    for kernels in ("auto", None):
        model = KernelPlugin("onchip")(model=llama(), include_kernels=kernels).train()
        log_probs = BaseTrainer.compute_log_probs(trainer, model, {"input_ids": tokens(), "labels": tokens()})
        (-log_probs).mean().backward()
        made.append([log_probs.detach(), *gradients(model)])
        if kernels and model.__dict__["_onchip"].report.materialized:
            raise AssertionError(str(model.__dict__["_onchip"].report))
    how = f"`BaseTrainer.compute_log_probs` of a Llama with the plugin and without, values and gradients: {agreed(*made)}"
    return importlib.metadata.version("llamafactory"), '`KernelPlugin("onchip")`', how


def megatron() -> Row:
    # Megatron asks for the GPU's index and its random state where neither is used.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    from megatron.core import package_info, parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from onchip.integrations.megatron import output_processor

    tensor_parallel.get_cuda_rng_tracker().fork = lambda *names: contextlib.nullcontext()
    one_process()
    parallel_state.initialize_model_parallel(1, 1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    made = []
    for extra in ({"output_processor": output_processor}, {}):
        for tied in (True, False):
            torch.manual_seed(0)
            spec = get_gpt_layer_local_spec()
            model = GPTModel(config, spec, 96, 16, share_embeddings_and_output_weights=tied)
            positions = torch.arange(16).expand(2, -1)
            mask = torch.ones(2, 1, 16, 16).triu(1).bool()
            losses = model(tokens(), positions, mask, labels=tokens(), **extra)
            losses.mean().backward()
            made.append([losses.detach(), *gradients(model)])
    error = agreed(made[0] + made[1], made[2] + made[3])
    how = f"a GPTModel's losses and gradients with it and without, tied head and not: {error}"
    return f"{package_info.__version__} (main)", "`GPTModel.forward(output_processor=)`", how


# By the order of the page; each function has the name of its folder.
STACKS: dict[str, Callable[[], Row]] = {
    "torchtitan": torchtitan,
    "verl": verl,
    "axolotl": axolotl,
    "NeMo Automodel": nemo,
    "LLaMA-Factory": llamafactory,
    "Megatron-LM": megatron,
}


if __name__ == "__main__":
    main()
