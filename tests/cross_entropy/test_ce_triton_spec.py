"""The Triton backend without Triton: its tiles, its memory formula, its refusals."""

import pytest
import torch

from onchip.frontend.torch_inputs import leading_dimensions
from onchip.kernels.triton import launch as triton_calls
from onchip.vocab.rows import launches
from onchip.vocab.rows import memory as row_memory


@pytest.mark.parametrize(("light", "twice"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles(dtype, light, twice):
    for vocab in (1, 2, 31, 1000, 1024, 1025, 8192, 16384, 16385, 32000, 50257, 65536, 128256, 262144):
        t = row_memory.heuristic_tiles(vocab, dtype, light=light, twice=twice)
        elements = t.tile // (32 * t.warps)  # of each thread
        assert elements in ((16,) if dtype == "float32" else (16, 32))
        assert t.tile & (t.tile - 1) == 0
        assert 1 <= t.programs <= 32
        assert t.warps * t.programs <= (32 if elements == 32 else 48)
        assert t.registers >= (64 if elements == 32 else 40)
    assert row_memory.heuristic_tiles(128256, "bfloat16", twice=True).programs == 1
    assert row_memory.heuristic_tiles(32000, "bfloat16", twice=True).programs == 4
    assert row_memory.RowTiles(32768, 16, 1).registers == 128
    assert row_memory.RowTiles(1024, 1, 1).registers == 255


def _units(logits, *others, writes=True):
    given = [logits, *others]
    return launches._units(given, [launches.rows_of(x) for x in given], 256, writes=writes)


def test_rows_have_a_line_only_where_they_lie_alike():
    """Kernels use one row's distance from its line for those of the other matrices."""

    def matrix(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    assert _units(matrix(5, 50257), matrix(5, 50257)) == (8, 64)
    assert _units(matrix(5, 50257, dtype=torch.float32)) == (4, 32)
    assert _units(matrix(5, 50257), matrix(5, 50257), matrix(5, 50257, dtype=torch.float32)) == (4, 64)
    assert _units(matrix(5, 50265)[:, :50257], writes=False) == (8, 64)  # without a gradient nothing else has rows
    for padding in (1, 8, 16):  # whole units, but no whole lines
        assert _units(matrix(5, 50257 + padding)[:, :50257], matrix(5, 50257)) == (1, 0)
        assert _units(matrix(5, 50257), matrix(5, 50257), matrix(5, 50257 + padding)[:, :50257]) == (1, 0)
    assert _units(matrix(2, 5, 50257)[:, :-1], matrix(2, 4, 50257)) == (1, 0)
    assert _units(matrix(12, 50257)[8:], matrix(4, 50257)) == (8, 64)
    assert _units(matrix(12, 50257)[1:], matrix(11, 50257)) == (1, 0)
    assert _units(matrix(5, 128264)[:, :128256], matrix(5, 128256)) == (8, 0)
    assert _units(matrix(5, 128264), matrix(5, 128264)) == (8, 64)
    assert _units(matrix(5, 128264), matrix(5, 128264), writes=False) == (8, 0)
    assert _units(matrix(5, 128256), matrix(5, 128256)) == (8, 0)


def test_memory_is_that_of_vectors():
    problem = row_memory.RowsProblem(8192, 128256, "bfloat16", device="cuda", triton=True)
    assert row_memory.scratch_bytes(problem, row_memory.plan(problem)) == 48 * 8192
    assert row_memory.plan(problem, "", 48 * 8192) == 8192
    with pytest.raises(ValueError, match="the kernels need 393216 bytes; raise scratch_bytes"):
        row_memory.plan(problem, "", 48 * 8192 - 1)


def test_refusals(monkeypatch):
    refusal = triton_calls.device_refusal
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert refusal("cuda", 0, torch.float32) == "it needs compute capability 8.0 or later; this is 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert refusal("cuda", 0, torch.float32) is None
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert refusal("cuda", 0, torch.float32) == "it is written for NVIDIA GPUs"
    monkeypatch.setattr(triton_calls, "find_spec", lambda name: None)
    assert refusal("cuda", 0, torch.float32) == "Triton is not installed"


def test_rows_in_two_leading_dimensions():
    x = torch.empty(4, 6, 8, 10)
    for view, leading in (
        (x, [(192, 10)]),
        (x[:, :, :5], [(24, 80), (5, 10)]),
        (x[:, :1], [(4, 480), (8, 10)]),
        (x.transpose(0, 1), [(6, 80), (4, 480), (8, 10)]),
        (x[0, 0].expand(3, 8, 10), [(3, 0), (8, 10)]),
        (x[0, 0, 0], []),
    ):
        assert leading_dimensions(view) == leading
