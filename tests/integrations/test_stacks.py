"""Integrations whose stacks aren't installed here: versions, refusals, and results that need no stack.

Modules with the same names replace the stacks.  tools/try_stacks.py runs the integrations in the real ones.
"""

import importlib
import inspect
import re
import runpy
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from integrations.stand_ins import DISTRIBUTIONS, refused
from integrations.tiny import batch, llama
from onchip.integrations import verl, versions
from onchip.integrations.head_options import HeadOptions
from onchip.integrations.megatron import output_processor
from onchip.integrations.transformers import patch

ROOT = Path(__file__).parents[2]


# ------------------------------------------------------------------------------------------------------------ versions


def start(name):
    """What a user does first with an integration."""
    if name == "verl":
        return verl.install()
    module = importlib.import_module(f"onchip.integrations.{name}")
    return module.install() if name == "maxtext" else module


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("found", [None, "0.2.9", "0.31", "1.0"])
def test_a_stack_that_is_missing_or_of_another_version(name, found, monkeypatch):
    def installed_version(distribution):
        if found is None:
            raise PackageNotFoundError(distribution)
        return found

    monkeypatch.delitem(sys.modules, f"onchip.integrations.{name}", raising=False)
    monkeypatch.setattr(versions, "installed_version", installed_version)
    distribution, version = DISTRIBUTIONS[name]
    said = f"{distribution} isn't installed" if found is None else f"this is {distribution} {found}, but onchip knows"
    remedy = re.escape(f"; pip install '{distribution}=={version}.*'")
    with pytest.raises(ModuleNotFoundError if found is None else RuntimeError, match=f"{name}: {said}.*{remedy}$"):
        start(name)


@pytest.mark.parametrize(("known", "found"), [("0.3", "0.3.0"), ("0.3", "0.3.1rc1"), ("0.9.5", "0.9.5.post1")])
def test_versions_that_are_known(known, found, monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda distribution: found)
    assert versions.require("name", "name", known) == found


# ----------------------------------------------------------------------------------------- NeMo, axolotl, LLaMA-Factory


class Chunked(nn.Module):
    """Automodel's loss, as far as it is used."""

    def __init__(self, compile, ignore_index, reduction):
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction

    @staticmethod
    def validate_lm_head(head):
        return head

    @staticmethod
    def materialize_lm_weight(weight, *, grad_reduce_group=None):
        return weight


def text_config(**settings):
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**settings))


def test_integrations_pass_on_the_same_options(fakes, torchtitan):
    given = {x.name: x.default for x in fields(HeadOptions)}
    taken = {name: x.default for name, x in inspect.signature(patch).parameters.items()}
    assert {name: taken[name] for name in taken if name not in ("model", "skip_logits")} == given
    Config = torchtitan.LinearCrossEntropyLoss.Config
    assert {x.name: x.default for x in fields(Config) if x.kw_only} == given
    assert "__slots__" in vars(Config)  # as torchtitan asks of every config
    OnchipArgs = fakes("axolotl", axolotl__integrations__base={"BasePlugin": object}).OnchipArgs
    assert OnchipArgs().model_dump() == {"onchip": True} | {f"onchip_{name}": x for name, x in given.items()}
    assert OnchipArgs(onchip_scratch_bytes="1GiB").onchip_scratch_bytes == "1GiB"
    refused(ValueError, "onchip_label_smoothing", OnchipArgs, onchip_label_smoothing="much")
    chunked = {"ChunkedCrossEntropy": Chunked}
    OnchipCrossEntropy = fakes("nemo", nemo_automodel__components__loss__chunked_ce=chunked).OnchipCrossEntropy
    assert OnchipCrossEntropy(scratch_bytes="1GiB").options == {"ignore_index": -100} | given | {
        "scratch_bytes": "1GiB"
    }
    refused(TypeError, "'softcap'", OnchipCrossEntropy, softcap=30.0)


def test_nemo(fakes):
    OnchipCrossEntropy = fakes(
        "nemo", nemo_automodel__components__loss__chunked_ce={"ChunkedCrossEntropy": Chunked}
    ).OnchipCrossEntropy
    hidden, weight, labels = torch.randn(1, 6, 4), torch.randn(9, 4), torch.tensor([0, 3, -100, 8, 8, 1])
    loss = OnchipCrossEntropy()
    refused(
        RuntimeError, r"call validate_lm_head\(model.lm_head, model_config=model.config\)", loss, hidden, labels, weight
    )
    refused(ValueError, "the model has no config", loss.validate_lm_head, nn.Linear(4, 9))
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"):
        config = text_config(**{name: 0.5})
        refused(ValueError, f"{name} is 0.5.*use MaskedCrossEntropy", loss.validate_lm_head, None, model_config=config)
    loss.validate_lm_head(nn.Linear(4, 9), model_config=text_config(final_logit_softcapping=2.0))
    logits = 2 * torch.tanh(hidden[0] @ weight.T / 2)
    mask, factor = torch.tensor([1, 1, 1, 0, 1, 1]), torch.arange(6) / 6
    each = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(loss(hidden, labels, weight, 5), each.sum() / 5)
    torch.testing.assert_close(
        loss(hidden, labels, weight, 5, None, factor, mask=mask), (each * factor * mask).sum() / 5
    )
    assert loss(hidden, labels, weight, 0) == 0
    refused(ValueError, r"mask is \[2\] and labels are \[6\]", loss, hidden, labels, weight, mask=mask[:2])
    mean = OnchipCrossEntropy(reduction="mean")
    mean.validate_lm_head(None, model_config=text_config())
    refused(ValueError, "need reduction='sum'; it is 'mean'", mean, hidden, labels, weight, 5)
    refused(ValueError, "scratch_bytes", OnchipCrossEntropy, scratch_bytes="1GiBB")


def test_axolotl_refuses(fakes, monkeypatch):
    axolotl = fakes("axolotl", axolotl__integrations__base={"BasePlugin": object})
    for other in axolotl.OTHERS:
        refused(ValueError, f"{other} replaces the model's loss too; remove it", axolotl.OnchipArgs, **{other: True})
    assert axolotl.OnchipArgs(onchip=False, liger_cross_entropy=True).onchip is False
    plugin = axolotl.OnchipPlugin()
    assert plugin.get_input_args() == "onchip.integrations.axolotl.OnchipArgs"
    config = SimpleNamespace(**axolotl.OnchipArgs().model_dump())
    monkeypatch.setattr(axolotl, "patch", lambda model, **options: SimpleNamespace(fused=False, reason="why"))
    refused(RuntimeError, "can't be patched: why; or set onchip to false", plugin.post_model_build, config, None)
    config.onchip = False
    plugin.post_model_build(config, None)


class BaseTrainer:
    """As LLaMA-Factory's."""

    def compute_log_probs(self, model, batch):
        outputs = model(**{name: x.to(self.device) for name, x in batch.items()})
        logits, labels = outputs.logits.float()[:, :-1].flatten(0, 1), batch["labels"][:, 1:]
        return -F.cross_entropy(logits, labels.flatten(), reduction="none").view(len(labels), -1)


class KernelPlugin:
    def __init__(self, name):
        assert name == "onchip"

    def register(self):
        return lambda function: function


def factory(trainer):
    return {
        "llamafactory__v1__plugins__model_plugins__kernels__interface": {"KernelPlugin": KernelPlugin},
        "llamafactory__v1__core__base_trainer": {"BaseTrainer": trainer},
    }


def test_llamafactory_refuses(fakes, monkeypatch):
    integration = fakes("llamafactory", **factory(BaseTrainer))
    apply_onchip = integration.apply_onchip
    assert apply_onchip("model", None) == apply_onchip("model", False) == "model"
    refused(ValueError, "include_kernels is 'liger'.*set it to auto", apply_onchip, nn.Linear(2, 2), "liger")
    monkeypatch.setattr(integration, "patch", lambda model: SimpleNamespace(fused=False, reason="why"))
    refused(RuntimeError, "can't be patched: why; leave out kernel_config", apply_onchip, None, True)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
def test_llamafactory_computes_log_probs_without_logits(fakes, wrap):
    model, given = llama(), batch()
    trainer = SimpleNamespace(device="cpu")
    made = []
    for patched in (False, True):
        if patched:
            apply_onchip = fakes("llamafactory", **factory(BaseTrainer)).apply_onchip
            assert apply_onchip(model, "auto") is model
        model.zero_grad()
        log_probs = BaseTrainer.compute_log_probs(trainer, wrap(model), given)
        (log_probs * torch.linspace(0, 1, 11)).sum().backward()
        made.append((log_probs.detach(), model.lm_head.weight.grad.clone()))
    for x, y in zip(*made, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)
    assert model.__dict__["_onchip"].report.losses == 1
    torch.testing.assert_close(BaseTrainer.compute_log_probs(trainer, llama(), given), made[0][0])


# ---------------------------------------------------------------------------------------------------------------- verl


class VerlFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
        return torch.zeros(()), torch.ones(())


class VerlModule(nn.Module):
    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        pass


@pytest.fixture
def verl_modules(fakes, monkeypatch):
    for cls in (VerlFunction, VerlModule):
        monkeypatch.setattr(cls.forward, "__module__", "verl.somewhere")
    integration = fakes(
        "verl",
        verl__utils__kernel__linear_cross_entropy={"linear_cross_entropy": VerlFunction.apply},
        verl__utils__experimental__torch_functional={"FusedLinearForPPO": VerlModule},
    )
    homes = "verl.utils.experimental.torch_functional", "verl.utils.kernel.linear_cross_entropy"
    return integration, *map(sys.modules.get, homes)


def test_verl(verl_modules, monkeypatch):
    integration, module_home, function_home = verl_modules
    theirs = function_home.linear_cross_entropy
    assert len(integration.install().replaced) == 2
    hidden, weight, ids = torch.randn(2, 3, 4), torch.randn(9, 4), torch.tensor([[0, 3, 8], [8, 8, 1]])
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    for backend in ("torch", "liger"):
        out = module_home.FusedLinearForPPO(impl_backend=backend)(hidden, weight, ids, temperature=0.7)
        torch.testing.assert_close(out, expected)
    out = function_home.linear_cross_entropy(hidden, weight, ids, 0.7, "none")
    torch.testing.assert_close(out, tuple(x.flatten() for x in expected))
    with pytest.warns(UserWarning, match="verl's own linear_cross_entropy runs, because the reduction is 'mean'"):
        assert function_home.linear_cross_entropy(hidden, weight, ids, 0.7, "mean")[1] == 1
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.warns(UserWarning, match="because tensor parallelism shards the vocabulary"):
        assert function_home.linear_cross_entropy(hidden, weight, ids, 0.7, "none", "group")[1] == 1
    refused(ValueError, "Choose 'torch' or 'liger'", module_home.FusedLinearForPPO, impl_backend="triton")
    integration.uninstall()
    assert (function_home.linear_cross_entropy, module_home.FusedLinearForPPO) == (theirs, VerlModule)


# ------------------------------------------------------------------------------------------------------------ Megatron


class ColumnParallelLinear(nn.Linear):
    pass


CONFIG = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "defer_embedding_wgrad_compute": False,
    "mtp_num_layers": None,
    "gradient_accumulation_fusion": True,
    "use_mup": False,
    "mup_output_mult": 3.0,
}
UNUSED = ("loss_mask", "input_ids", "position_ids", "attention_mask", "decoder_input", "packed_seq_params")


def processed(head=None, weight=None, labels=True, inference=None, context=None, **settings):
    torch.manual_seed(0)
    hidden, target = torch.randn(3, 2, 4), torch.tensor([[0, 3, -100], [8, 8, 1]])
    others = {*UNUSED, "runtime_gather_output", "compute_language_model_loss", "scale_logits"}
    out = output_processor(
        hidden_states=hidden,
        output_layer=ColumnParallelLinear(4, 9, bias=False) if head is None else head,
        output_weight=weight,
        labels=target if labels else None,
        inference_context=inference,
        context=context,
        config=SimpleNamespace(**CONFIG | settings),
        **dict.fromkeys(others),
    )
    return out, hidden, target


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_megatron_losses_of_tokens(tied, scale):
    head, weight = ColumnParallelLinear(4, 9, bias=False), torch.randn(9, 4)
    losses, hidden, target = processed(head, weight if tied else None, use_mup=scale != 1, context={"softcap": 5.0})
    logits = 5 * torch.tanh(scale * (hidden @ (weight if tied else head.weight).T) / 5)
    expected = F.cross_entropy(logits.permute(1, 2, 0), target, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert losses.is_contiguous()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"head": nn.Linear(4, 9)}, RuntimeError, "the output layer is a Linear.*leave adapters off it"),
        ({"head": ColumnParallelLinear(4, 9)}, RuntimeError, "has a bias.*build it without"),
        ({"tensor_model_parallel_size": 2}, RuntimeError, "set tensor_model_parallel_size to 1"),
        ({"sequence_parallel": True}, RuntimeError, "set sequence_parallel to False"),
        ({"inference": "context"}, RuntimeError, "this is inference.*pass output_processor only in training"),
        ({"defer_embedding_wgrad_compute": True}, RuntimeError, "set defer_embedding_wgrad_compute to False"),
        ({"mtp_num_layers": 1}, RuntimeError, "set gradient_accumulation_fusion to False"),
        ({"labels": False}, ValueError, "there are no labels; pass output_processor where labels are passed"),
        ({"context": {"smoothing": 0.1}}, TypeError, "smoothing"),
        ({"context": {"z_loss": -1.0}}, ValueError, "z_loss"),
    ],
)
def test_megatron_refuses(changes, error, message):
    refused(error, message, processed, **changes)


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_table_has_each_stack_that_the_script_tries(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    script = runpy.run_path(str(ROOT / "tools" / "try_stacks.py"), run_name="try_stacks")
    page = (ROOT / "docs" / "guides" / "stacks.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| (\S[^|]*) \|.*\| \d{4}-\d\d-\d\d \|$", page, flags=re.MULTILINE))
    assert list(rows) == list(script["STACKS"])
    for name, stack in script["STACKS"].items():
        if stack.packages:
            version = stack.packages[0].partition("==")[2] or f"main, {script['MEGATRON_COMMIT'][:9]}"
            assert rows[name] == version
