"""Files that commands write: refused before any work, and replaced as a whole."""

import errno

import pytest

from onchip.core import files
from shared import run_cli


@pytest.mark.parametrize("command", ["bench cross_entropy --device cpu", "demo --device cpu"])
@pytest.mark.parametrize("below", ["file", "file/below", "nothing/below"])
def test_out_is_refused_in_a_line_before_any_work(command, below, tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "file").write_text("mine")
    if below.startswith("nothing"):
        monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr("onchip.bench.environment._busy_cores", lambda: 0.0)
    monkeypatch.setattr("onchip.bench.harness.run_cases", lambda *_, **__: pytest.fail("it ran"))
    result = run_cli(*command.split(), "--out", tmp_path / below, columns=400)
    assert result.exit_code == 2, result.output
    reason = "Read-only file system" if below.startswith("nothing") else "a file is in its place"
    (line,) = result.output.strip().splitlines()
    assert line == f"onchip: --out must be a folder to write to; {tmp_path / below} isn't ({reason}): name another"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("content", ["new\n", b"\x00new"])
def test_a_file_is_replaced_as_a_whole(content, tmp_path, monkeypatch):
    path = tmp_path / "below" / "file"
    files.replace(path, "old")
    synced = []
    monkeypatch.setattr(files.os, "fsync", synced.append)
    with path.open() as reader:
        files.replace(path, content)
        assert reader.read() == "old"
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert synced
    assert path.stat().st_mode & 0o777 == 0o644

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        files.replace(path, "newer")
    assert path.read_bytes() != b"newer"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
