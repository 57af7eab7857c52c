"""What the checks of stacks are made of: the guides' examples, a small model, and how results are compared."""

import importlib.machinery
import re
import types
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
PAGE = GUIDES / "stacks.md"
BOUND = 1e-5  # of the relative error in float32

Checked = tuple[str, str]  # what is hooked, tested how


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
