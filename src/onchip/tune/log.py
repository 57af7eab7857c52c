"""The log beside a file of configs: a line for each measured candidate, so that an interrupted run can go on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from onchip.core.configs import format_config


@dataclass(frozen=True)
class Result:
    """What became of one candidate."""

    config: Mapping[str, int]
    outcome: Literal["right", "wrong", "failing", "shared memory"]
    """Only a right one is timed; one that needs more shared memory than there is is not even run."""
    ms: float | None = None
    """Median of the few first runs, in milliseconds."""
    reason: str | None = None


def append(path: Path, problem: Mapping[str, Any], result: Result) -> None:
    """Add a line; the folder must exist.  `problem` is what results are comparable within."""
    # The newline goes first: half a line that a killed process left must not swallow this one.
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({**problem, **asdict(result)}, allow_nan=False))


def read(path: Path, problem: Mapping[str, Any]) -> dict[str, Result]:
    """The last result of each candidate for this problem, by `format_config`.

    A line that can't be read is passed over, and its candidate measured again: a killed process may have left half of
    one.
    """
    results = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            entry: dict[str, Any] = json.loads(line)
            if all(entry[name] == value for name, value in problem.items()):
                result = Result(**{name: entry[name] for name in Result.__dataclass_fields__})
                results[format_config(result.config)] = result
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return results
