"""What several commands let a user choose, and names that are looked up."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Framework = Annotated[str | None, typer.Option(help="torch or jax. Default: torch where it is installed.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="Case name or pattern; may be given several times.")]


def matching(option: str, patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that match a pattern, in their own order.

    Raises:
        ValueError: a pattern of `option` matches none.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{option} {pattern!r} matches nothing; there is: {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def known_op(op: str, known: Collection[str]) -> None:
    """Raise ValueError for an op that is not among those `known`."""
    if op not in known:
        raise ValueError(f"no op {op!r}; there is: {', '.join(known)}")
