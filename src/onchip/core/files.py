"""Files that commands write: checked before the work, and put in place as a whole after it."""

import os
import tempfile
from pathlib import Path


def check_writable(option: str, *paths: Path) -> None:
    """Make the folder for these files; raise a ValueError that names the option if one of them can't be written."""
    folder = paths[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        taken = next((path for path in paths if path.is_dir()), None)
    except OSError as error:
        reason = "a file is in its place" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise ValueError(f"{option} must be a folder to write to; {folder} isn't ({reason}): name another") from error
    if taken is not None:
        raise ValueError(
            f"{option} must be a folder to write to; {taken} is a folder where a file should go: name another"
        )


def replace(path: Path, content: str | bytes) -> None:
    """Write a file with this content, in place of one that may be there; make the folder if needed.

    A reader sees the old file or the new one, even after a crash.  If two processes write at once, one of them wins.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # temporary files are the user's alone; these may be shared or shipped
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
