import pytest


@pytest.fixture(autouse=True)
def seed():
    """Tests that draw their own numbers draw the same ones every time."""
    try:
        import torch
    except ImportError:
        return
    torch.manual_seed(0)
