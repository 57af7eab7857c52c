"""Makes the table of docs/guides/stacks.md: tries each integration with the stack that it is for, on the CPU.

    python tools/try_stacks.py [--folder build/stacks] [--megatron REPOSITORY] [--page] [STACK...]

Each stack is installed into its own folder in FOLDER unless it is there; the environment of this Python has everything
else and isn't changed.  Then the stack's examples in docs/guides run, and its check: a small model's loss and gradients
with onchip and by the stack's own functions.  The table is printed and, with --page, written into the page.  The exit
status is 1 if a stack failed.

STACK is a name in the table; without any, all run, in about six minutes.  Megatron-LM's branch comes from REPOSITORY.
"""

import argparse
import contextlib
import copy
import datetime
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ROOT / "docs" / "guides"
PAGE = GUIDES / "stacks.md"
HEADER = "| stack | version | what is hooked | tested how | on |\n|---|---|---|---|---|"
BOUND = 1e-5  # of the relative error in float32

MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
MEGATRON_COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"  # of 2026-08-22

Checked = tuple[str, str]  # what is hooked, tested how


@dataclass(frozen=True)
class Stack:
    """What a row of the table is made from."""

    distribution: str
    check: Callable[[], Checked]
    packages: tuple[str, ...] = ()  # to install; none: the environment has it
    pages: tuple[str, ...] = ()  # of docs/guides, whose examples run first
    processes: int = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", nargs="*", metavar="STACK", help=", ".join(STACKS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "stacks", help="where stacks are installed")
    parser.add_argument("--megatron", default=MEGATRON, metavar="REPOSITORY", help="a clone of Megatron-LM, or its URL")
    parser.add_argument("--page", action="store_true", help=f"write the rows into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = [name for name in given.stacks if name not in STACKS]
    if unknown:
        parser.error(f"there is no stack {', '.join(unknown)}; the stacks are {', '.join(STACKS)}")
    if given.check:
        return check(given.stacks[0])
    print(HEADER, flush=True)
    failed = 0
    for name in given.stacks or STACKS:
        row = run(name, given.folder.resolve() / name.replace(" ", "_"), given.megatron)
        print(row or f"| {name} | failed | | | |", flush=True)
        failed += row is None
        if row and given.page:
            write(name, row)
    return failed > 0


def run(name: str, folder: Path, megatron: str) -> str | None:
    """The stack's row, or None with its process's output on stderr."""
    stack = STACKS[name]
    if stack.packages and not folder.exists():
        try:
            install(name, folder, megatron)
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
            return None
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stack.processes}"]
    command = [sys.executable, "-W", "ignore", *(launcher if stack.processes > 1 else []), __file__, "--check", name]
    with tempfile.TemporaryDirectory() as empty:
        ran = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=900)
    # Not the exit status: gloo's threads abort now and then where a process ends.
    rows = [line for line in ran.stdout.splitlines() if line.startswith(f"| {name} |")]
    if not rows:
        print(ran.stdout, ran.stderr, sep="\n", file=sys.stderr)
    return rows[0] if rows else None


def install(name: str, folder: Path, megatron: str) -> None:
    """Install the stack and what it imports, without their dependencies; the environment's packages aren't changed."""
    with tempfile.TemporaryDirectory() as made:
        if STACKS[name].packages == (MEGATRON,):
            git = ["git", "-C", made]
            subprocess.run([*git, "init", "--quiet"], check=True)
            subprocess.run([*git, "fetch", "--quiet", "--depth=1", megatron, MEGATRON_COMMIT], check=True)
            subprocess.run([*git, "checkout", "--quiet", "FETCH_HEAD"], check=True)
        else:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", made]
            command += ["--ignore-requires-python"]  # MaxText asks for 3.12, and what is used of it runs with 3.11
            subprocess.run([*command, *STACKS[name].packages], check=True)
        shutil.copytree(made, folder, ignore=shutil.ignore_patterns(".git"))


def check(name: str) -> int:
    """Run the stack's examples and its check; print its row."""
    stack = STACKS[name]
    for page in stack.pages:
        run_examples(page, name)
    hooked, how = stack.check()
    version = importlib.metadata.version(stack.distribution) if stack.distribution else f"main, {MEGATRON_COMMIT[:9]}"
    if os.environ.get("RANK", "0") == "0":
        print("|".join(("", *(f" {cell} " for cell in (name, version, hooked, how, datetime.date.today())), "")))
    return 0


def run_examples(page: str, name: str) -> dict[str, Any]:
    """Run a page's Python blocks, in stacks.md only those under the stack's heading; returns what they define."""
    text = section(name) if page == PAGE.name else (GUIDES / page).read_text(encoding="utf-8")
    defined: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    if not blocks:
        raise AssertionError(f"{page} has no Python for {name}")
    for block in blocks:
        exec(compile(block, page, "exec"), defined)
    return defined


def section(name: str) -> str:
    """What stacks.md says about a stack."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {name}\n")[2]
    return re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]


def write(name: str, row: str) -> None:
    """Put the stack's row into the page's table, in the place of its old one."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(rf"^\| {name} \|.*$", lambda _: row, text, flags=re.MULTILINE), encoding="utf-8")


# ---------------------------------------------------------------------------------------------- what checks are made of


def agreed(made: Sequence[Any], expected: Sequence[Any], bound: float = BOUND) -> float:
    """The largest relative error; raises if it is above the bound."""
    pairs = [[torch.as_tensor(x, dtype=torch.float32) for x in pair] for pair in zip(made, expected, strict=True)]
    error = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
    if not error < bound:
        raise AssertionError(f"the relative error is {error:.1e}")
    return error


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters() if p.requires_grad]


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, **size, **settings))


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(96, (2, 16))


def fused(model: Any) -> None:
    """Raise unless `patch` computed each loss of the model without its logits."""
    report = model.__dict__["_onchip"].report
    if not report.losses or report.materialized:
        raise AssertionError(str(report))


def tests(name: str) -> str:
    path = f"tests/integrations/test_{name}.py"
    if not (ROOT / path).exists():
        raise AssertionError(f"there is no {path}")
    return f"every test run includes `{path}`"


# ---------------------------------------------------------------------------------------------------------- the stacks


def transformers() -> Checked:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from onchip.integrations.transformers import patch

    rows = [{"input_ids": row, "labels": row} for row in tokens().tolist()] * 8

    def train(patched: bool) -> list[float]:
        model = llama()
        if patched:
            patch(model)
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder, max_steps=3, logging_steps=1, report_to="none", use_cpu=True, gradient_accumulation_steps=2
            )
            trainer = Trainer(model, args, train_dataset=Dataset.from_list(rows))
            with contextlib.redirect_stdout(None):
                trainer.train()
        if patched:
            fused(model)
        return [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]

    error = agreed(train(True), train(False))
    how = f"`Trainer`, 3 steps of a patched Llama, losses and gradient norms: {error:.0e}; {tests('transformers')}"
    return "`model.loss_function`, `lm_head.forward`", how


def peft() -> Checked:
    from peft import LoraConfig, get_peft_model

    from onchip.integrations.transformers import patch

    made = []
    for patched in (True, False):
        config = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(llama(), config)
        if patched:
            patch(model)
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        made.append([loss.detach(), *gradients(model)])
        if patched:
            fused(model.base_model.model)
    how = f"LoRA on `q_proj` and `lm_head`, loss and the adapters' gradients: {agreed(*made):.0e}; {tests('peft')}"
    return "as transformers", how


def trl() -> Checked:
    import trl.trainer.utils as home

    from onchip.integrations import trl as integration

    def step() -> list[Any]:
        torch.manual_seed(0)
        hidden, weight = torch.randn(50, 32, requires_grad=True), torch.randn(96, 32, requires_grad=True)
        given = hidden, weight, None, torch.randint(96, (50,)), 0.7, 16, None, 1.0, ("entropy", "mean_logits")
        log_prob, entropy, _, mean_logits, _ = home._ChunkedLogProbFunction.apply(*given)
        (log_prob.sum() + 0.1 * entropy.sum()).backward()
        return [log_prob.detach(), entropy.detach(), mean_logits, hidden.grad, weight.grad]

    theirs = step()
    installed = integration.install()
    error = agreed(step(), theirs)
    integration.uninstall()
    how = f"its log-probabilities, entropies and their gradients: {error:.0e}; {tests('trl')}"
    return ", ".join(f"`{name.rpartition('.')[2]}`" for name in installed.replaced), how


def accelerate() -> Checked:
    from accelerate import Accelerator

    from onchip.integrations.transformers import patch

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    made = []
    for patched in (True, False):
        model = llama()
        if patched:
            patch(model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens(), labels=tokens()).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        made.append([*losses, *(p.detach() for p in model.parameters())])
        if patched:
            fused(accelerator.unwrap_model(model))
    how = f"`Accelerator`, 4 accumulated steps of a patched Llama, losses and weights: {agreed(*made):.0e}"
    return "as transformers", how


def flax() -> Checked:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from onchip.integrations.flax import LinearHead

    hidden = jax.random.normal(jax.random.key(0), (2, 16, 32))
    labels = jnp.asarray(tokens().numpy())

    def loss(head: Any) -> Any:
        if isinstance(head, LinearHead):
            return head(hidden, labels, shift=False)
        return optax.softmax_cross_entropy_with_integer_labels(head(hidden), labels).mean()

    made = []
    for kind in (LinearHead, nnx.Linear):
        value = nnx.value_and_grad(loss)(kind(32, 96, rngs=nnx.Rngs(0)))
        made.append([np.asarray(x) for x in jax.tree.leaves(value)])
    how = f"`LinearHead` and `nnx.Linear` with optax, loss and gradients: {agreed(*made):.0e}; {tests('flax')}"
    return "`nnx.Linear`, `nnx.Embed`, `linen.Dense`", how


def levanter() -> Checked:
    import jax
    import jax.numpy as jnp
    import numpy as np

    # The package imports a trainer and all that it needs, and its kernels import a way to cloud storage.
    spec = importlib.util.find_spec("levanter")
    package, storage = types.ModuleType("levanter"), types.ModuleType("rigging.filesystem")
    package.__path__ = list(spec.submodule_search_locations)
    storage.url_to_fs = None
    sys.modules |= {"levanter": package, "rigging": types.ModuleType("rigging"), "rigging.filesystem": storage}
    from levanter.kernels.pallas.fused_cross_entropy_loss import api

    from onchip.integrations import levanter as integration

    x, w = jax.random.normal(jax.random.key(0), (32, 16)), jax.random.normal(jax.random.key(1), (16, 96))
    labels = jnp.asarray(tokens().flatten().numpy())
    weight = jnp.arange(32) / 32

    def step(implementation: str | None) -> list[Any]:
        def loss(x: Any, w: Any) -> Any:
            return api.fused_cross_entropy_loss_and_logsumexp_penalty(
                x, labels, w, weight=weight, logsumexp_weight=1e-2, logit_soft_cap=3.0, implementation=implementation
            )

        return [np.asarray(x) for x in jax.tree.leaves(jax.value_and_grad(loss, (0, 1))(x, w))]

    integration.register(default=True)
    errors = [agreed(step(name), step("reference")) for name in ("onchip", None)]
    integration.unregister()
    how = f"its kernels' loss by name and by default, against its 'reference', loss and gradients: {max(errors):.0e}"
    return "`IMPLEMENTATIONS`, `_default_implementations`", f"{how}; {tests('levanter')}"


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


def verl() -> Checked:
    from verl.models.transformers.monkey_patch import patch_forward_with_backends
    from verl.utils.experimental import torch_functional as home

    from onchip.integrations import verl as integration

    # As the page says: a module of the user's that verl imports, and what it prints.
    code, printed = re.findall(r"^```(?:python|text)\n(.*?)^```", section("verl"), flags=re.MULTILINE | re.DOTALL)[:2]
    Path("my_verl.py").write_text(code, encoding="utf-8")
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "my_verl"}
    said = subprocess.run([sys.executable, "-c", "import verl"], env=environment, stdout=subprocess.PIPE, text=True)
    if printed not in said.stdout:
        raise AssertionError(f"verl's import printed {said.stdout!r}")
    theirs = home.FusedLinearForPPO

    def step(backend: str) -> list[Any]:
        model = llama()
        with contextlib.redirect_stdout(None):
            patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
        out = model(input_ids=tokens(), temperature=0.7, return_dict=True)
        factors = torch.linspace(-1, 1, 32)
        ((out.log_probs.flatten() + 0.1 * out.entropy.flatten()) * factors).sum().backward()
        return [out.log_probs.detach().flatten(), out.entropy.detach().flatten(), *gradients(model)]

    expected = step("torch")
    installed = integration.install()
    errors = [agreed(step(backend), expected) for backend in ("torch", "liger", "triton")]
    integration.uninstall()
    if home.FusedLinearForPPO is not theirs:
        raise AssertionError("uninstall left onchip's")
    how = (
        "a Llama patched by verl for fused kernels 'torch', 'liger' and 'triton', against verl's own 'torch', values "
        f"and gradients: {max(errors):.0e}"
    )
    return ", ".join(f"`{name.rpartition('.')[2]}`" for name in installed.replaced), how


def axolotl() -> Checked:
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    manager = PluginManager.get_instance()
    manager.register("onchip.integrations.axolotl.OnchipPlugin")
    fields = merge_input_args()[1].model_fields
    model, ids = llama(), tokens()
    plain = copy.deepcopy(model)
    manager.post_model_build(DictDefault({"onchip_z_loss": 0.0}), model)
    made = []
    for x in (model, plain):
        loss = x(input_ids=ids, labels=ids).loss
        loss.backward()
        made.append([loss.detach(), *gradients(x)])
    fused(model)
    options = sum(name.startswith("onchip") for name in fields)
    how = (
        f"a Llama patched through its `PluginManager`, loss and gradients: {agreed(*made):.0e}; its config class takes "
        f"the {options} options"
    )
    return "`BasePlugin.post_model_build`, `get_input_args`", how


def nemo() -> Checked:
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
    how = f"its `calculate_loss` of a Llama, against `MaskedCrossEntropy`, loss and gradients: {agreed(*made):.0e}"
    return "`LinearCrossEntropy`, by its subclass `ChunkedCrossEntropy`", how


def llamafactory() -> Checked:
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
    how = f"`BaseTrainer.compute_log_probs` of a Llama with and without, values and gradients: {agreed(*made):.0e}"
    return '`KernelPlugin("onchip")`', how


def megatron() -> Checked:
    # Megatron asks for the GPU's index and its random state where neither is used.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from onchip.integrations.megatron import output_processor

    tensor_parallel.get_cuda_rng_tracker().fork = lambda *names: contextlib.nullcontext()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    made: list[list[Any]] = []
    for extra in ({"output_processor": output_processor}, {}):
        made.append([])
        for tied in (True, False):
            torch.manual_seed(0)
            spec = get_gpt_layer_local_spec()
            model = GPTModel(config, spec, 96, 16, share_embeddings_and_output_weights=tied)
            positions = torch.arange(16).expand(2, -1)
            mask = torch.ones(2, 1, 16, 16).triu(1).bool()
            losses = model(tokens(), positions, mask, labels=tokens(), **extra)
            losses.mean().backward()
            made[-1] += [losses.detach(), *gradients(model)]
    how = f"a GPTModel's losses and gradients with it and without, tied head and not: {agreed(*made):.0e}"
    return "`GPTModel.forward(output_processor=)`", how


class StandIns:
    """Finds an empty module for each of these packages: it can be imported, has every name, and does nothing."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.prefixes = tuple(f"{package}." for package in packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if f"{name}.".startswith(self.prefixes):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        def named(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {}) if name[0].isupper() else unittest.mock.MagicMock()

        module.__getattr__ = named  # type: ignore[method-assign]


def maxtext() -> Checked:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    # What the model of the check doesn't use; the modules of MaxText's own need Python 3.12, JAX 0.11 or more packages.
    sys.meta_path.insert(
        0,
        StandIns(  # type: ignore[arg-type]
            (
                *("aqt", "drjax", "grain", "pathwaysutils", "qwix", "tokamax"),
                *("maxtext.input_pipeline", "maxtext.kernels.attention.jax_flash_attention", "maxtext.kernels.mhc"),
            )
        ),
    )
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from jax.sharding import Mesh

    with contextlib.redirect_stdout(None):
        from maxtext.common.train_state_nnx import TrainStateNNX
        from maxtext.configs import pyconfig
        from maxtext.models.models import Transformer
        from maxtext.trainers.pre_train import train
        from maxtext.utils.sharding import nnx_construct_named_sharding

    from onchip.integrations import maxtext as integration

    jax.config.update("jax_disable_most_optimizations", True)
    base = Path(train.__file__).parents[2] / "configs" / "base.yml"
    size = {"base_emb_dim": 32, "head_dim": 16, "base_num_query_heads": 2, "base_num_kv_heads": 2, "base_mlp_dim": 32}
    size |= {"vocab_size": 96, "base_num_decoder_layers": 1, "max_target_length": 16, "per_device_batch_size": 1}
    plain = {"attention": "dot_product", "dtype": "float32", "enable_checkpointing": False, "hardware": "cpu"}
    plain |= {"dataset_type": "synthetic", "run_name": "check", "skip_jax_distributed_system": True}
    ids = jnp.asarray(torch.cat([tokens(), tokens().flip(0)]).numpy(), jnp.int32)
    data = {"inputs": ids, "inputs_position": jnp.arange(16) + 0 * ids, "inputs_segmentation": jnp.ones_like(ids)}
    data |= {"targets": jnp.roll(ids, -1, 1), "targets_segmentation": jnp.ones_like(ids).at[0, 10:].set(0)}

    @contextlib.contextmanager
    def built(axes: dict[str, int], **settings: Any) -> Iterator[tuple[Any, Any, Any]]:
        settings = {"num_vocab_tiling": 4, "z_loss_multiplier": 1e-2} | settings | size | plain
        with contextlib.redirect_stdout(None):
            config = pyconfig.initialize([None, str(base)], **settings)
        shape = [axes.get(name, 1) for name in config.mesh_axes]
        mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), config.mesh_axes)
        with mesh, logical_axis_rules(config.logical_axis_rules):
            yield config, mesh, Transformer(config, mesh, quant=None, rngs=nnx.Rngs(params=0, dropout=1))

    def step(tied: bool, **axes: int) -> list[Any]:
        """The loss and the gradients of one batch, by MaxText's `loss_fn`; for a tied head, the embedding's last."""
        with built(axes, logits_via_embedding=tied, final_logits_soft_cap=3.0) as (config, _, model):
            graph, parameters, rest = nnx.split(model, nnx.Param, ...)

            def loss(parameters: Any) -> Any:
                value, aux = train.loss_fn(nnx.merge(graph, parameters, rest, copy=True), config, {**data}, None, None)
                return value, aux["z_loss"]

            made = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
        return [np.asarray(x) for x in jax.tree.leaves(made)]

    def steps() -> list[Any]:
        """The losses and gradient norms of 3 steps on 4 devices, each of 2 batches, by MaxText's `train_step`."""
        with built({"fsdp": 4}, gradient_accumulation_steps=2) as (config, mesh, model):
            parameters = nnx.state(model, nnx.Param)
            shards = nnx_construct_named_sharding(parameters, mesh)
            nnx.update(model, jax.device_put(parameters, shards))
            optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
            graph, state = nnx.split(TrainStateNNX(model, optimizer))
            two = {name: jnp.concatenate([x, x[::-1]]) for name, x in data.items()}
            run = jax.jit(lambda state: train.train_step(graph, config, None, shards, state, {**two}))
            made = []
            for _ in range(3):
                state, metrics = run(state)
                made += [np.asarray(metrics["scalar"][f"learning/{name}"]) for name in ("loss", "grad_norm")]
        return made

    ways: list[dict[str, Any]] = [{"tied": False}, {"tied": True}, {"tied": False, "fsdp": 2, "context": 2}]
    theirs = [*(step(**way) for way in ways), steps()]
    own = train.vocab_tiling_nnx_loss
    code, printed = re.findall(r"^```(?:python|text)\n(.*?)^```", section("MaxText"), flags=re.MULTILINE | re.DOTALL)[
        :2
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, PAGE.name, "exec"), {})
    if said.getvalue() != printed or train.vocab_tiling_nnx_loss is not integration.vocab_tiling_nnx_loss:
        raise AssertionError(f"install() printed {said.getvalue()!r}")
    ours = [*(step(**way) for way in ways), steps()]
    integration.uninstall()
    if train.vocab_tiling_nnx_loss is not own:
        raise AssertionError("uninstall left onchip's")
    # MaxText rounds the gradient of a tied head to bfloat16, and so does onchip.
    rounded = agreed([ours[1].pop()], [theirs[1].pop()], bound=2**-8)
    errors = [agreed(*pair) for pair in zip(ours, theirs, strict=True)]
    how = (
        "its `loss_fn` of a Transformer with stand-ins for packages that it imports, against its own, head of its own "
        f"and tied, loss and gradients: {max(errors[:2]):.0e}, of the tied embedding, which MaxText rounds to "
        f"bfloat16: {rounded:.0e}; with tokens on 4 devices by FSDP and context parallelism: {errors[2]:.0e}; 3 "
        "steps of its `train_step` with FSDP on 4 devices and accumulated gradients, losses and gradient norms: "
        f"{errors[3]:.0e}; {tests('maxtext')}"
    )
    return "`vocab_tiling_nnx_loss`", how


STACKS = {
    "transformers": Stack("transformers", transformers),
    "PEFT": Stack("peft", peft),
    "TRL": Stack("trl", trl),
    "accelerate": Stack("accelerate", accelerate),
    "torchtitan": Stack(
        "torchtitan",
        torchtitan,
        (
            "torchtitan==0.3.0",
            "spmd_types==0.2.3",
            "docstring_parser==0.18.0",
            "einops==0.8.2",
            "tensorboard==2.21.0",
            "torch_checkpointing==0.1.1",
            "torchdata==0.11.0",
            "typeguard==4.6.0",
            "tyro==1.0.17",
        ),
        processes=2,
    ),
    "verl": Stack(
        "verl",
        verl,
        (
            "verl==0.9.1",
            "antlr4-python3-runtime==4.13.2",
            "attrs==26.1.0",
            "cloudpickle==3.1.2",
            "codetiming==1.4.0",
            "hydra-core==1.3.8",
            "importlib_metadata==10.2.0",
            "jsonschema==4.26.0",
            "jsonschema_specifications==2025.9.1",
            "msgpack==1.2.4",
            "omegaconf==2.4.0",
            "orjson==3.13.0",
            "pyvers==0.2.3",
            "ray==2.60.0",
            "referencing==0.37.0",
            "rpds_py==2026.9.1",
            "tensordict==0.15.3",
        ),
        ("stacks.md",),
    ),
    "axolotl": Stack("axolotl", axolotl, ("axolotl==0.19.0", "addict==2.4.0")),
    "NeMo Automodel": Stack("nemo-automodel", nemo, ("nemo-automodel==0.7.0",)),
    "LLaMA-Factory": Stack(
        "llamafactory",
        llamafactory,
        ("llamafactory==0.9.5", "antlr4-python3-runtime==4.13.2", "omegaconf==2.4.0", "torchdata==0.11.0"),
        ("stacks.md",),
    ),
    "Megatron-LM": Stack("", megatron, (MEGATRON,), ("stacks.md",)),
    "Flax": Stack("flax", flax),
    "Levanter": Stack(
        "marin-levanter",
        levanter,
        ("marin-levanter==0.2.20.dev202606180959", "braceexpand==0.1.7", "jaxtyping==0.3.11"),
    ),
    "MaxText": Stack("maxtext", maxtext, ("maxtext==0.2.5", "antlr4-python3-runtime==4.13.2", "omegaconf==2.4.0")),
}
"""In the page's order."""


if __name__ == "__main__":
    sys.exit(main())
