"""Names that a user gives on the command line."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase


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
