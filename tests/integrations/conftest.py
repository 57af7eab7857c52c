import importlib
import sys

import pytest
from torch import nn

from integrations.stand_ins import DISTRIBUTIONS, TitanConverter, TitanExperts, TitanLinear, TitanLoss, TitanVarlen
from onchip.integrations import versions


@pytest.fixture
def fakes(monkeypatch, stand_in):
    """Put modules with these names in the place of stacks, and import an integration that finds them."""
    monkeypatch.setattr(versions, "installed_version", lambda distribution: dict(DISTRIBUTIONS.values())[distribution])

    def put(integration, **modules):
        for name, names in modules.items():
            stand_in(name.replace("__", "."), names)
        monkeypatch.delitem(sys.modules, f"onchip.integrations.{integration}", raising=False)
        return importlib.import_module(f"onchip.integrations.{integration}")

    return put


@pytest.fixture
def torchtitan(fakes):
    return fakes(
        "torchtitan",
        spmd_types={"is_type_checking": lambda: False},
        torchtitan__components__loss={"IGNORE_INDEX": -100, "BaseLoss": TitanLoss, "ChunkedLossWrapper": TitanLoss},
        torchtitan__distributed__spmd_types={"current_spmd_mesh": lambda: None},
        torchtitan__models__common__attention={"VarlenAttention": TitanVarlen},
        torchtitan__models__common__linear={"Linear": TitanLinear},
        torchtitan__models__common__moe={"GroupedExperts": TitanExperts},
        torchtitan__protocols__model={"ModelConfigConverter": TitanConverter},
        torchtitan__protocols__module={"Module": nn.Module},
    )
