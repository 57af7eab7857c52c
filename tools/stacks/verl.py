"""verl: its fused kernels."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from stacks.common import Checked, agreed, gradients, llama, section, tokens


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
