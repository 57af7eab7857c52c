import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    """Tests that draw their own numbers draw the same ones every time."""
    torch.manual_seed(0)
