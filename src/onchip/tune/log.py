"""The log beside a file of configs: a line for each measured candidate, so that an interrupted run can go on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Result:
    """What became of one candidate."""

    config: Mapping[str, int]
    outcome: Literal["right", "wrong", "failing", "shared memory"]
    """Only a right one is timed; one that needs more shared memory than there is is not even run."""
    ms: float | None = None
    """Median of the few first runs, in milliseconds."""
    reason: str | None = None


@dataclass(frozen=True)
class Problem:
    """What results are comparable within: one kernel, one size, one set of packages."""

    kernel: str
    dtype: str
    sizes: Mapping[str, int]
    versions: Mapping[str, str]


def config_key(config: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The same for equal configs, and hashable."""
    return tuple(sorted(config.items()))


def append(path: Path, problem: Problem, result: Result) -> None:
    """Add a line; the folder must exist."""
    # The newline goes first: half a line that a killed process left must not swallow this one.
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({**asdict(problem), **asdict(result)}, allow_nan=False))


def read(path: Path, problem: Problem) -> dict[tuple[tuple[str, int], ...], Result]:
    """The last result of each candidate for this problem, by `config_key`.

    A line that can't be read is passed over: a process that was killed may have left half of one, and what it stood for
    is measured again.
    """
    if not path.exists():
        return {}
    wanted = asdict(problem)
    results = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry: dict[str, Any] = json.loads(line)
            if all(entry[name] == value for name, value in wanted.items()):
                result = Result(**{name: entry[name] for name in Result.__dataclass_fields__})
                results[config_key(result.config)] = result
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return results
