"""What several commands let a user choose, and names that are looked up."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer


def words(help: str, *choices: str) -> Any:
    """An option that is one of these words: its help and the shell's completion list them, the command checks them."""
    return typer.Option(help=help, metavar=f"[{'|'.join(choices)}]", autocompletion=completion(choices))


def completion(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """What the shell offers: those that begin as what is typed."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def operands(choices: Sequence[str], more: str = "") -> Any:
    """An argument that is one or several of these names."""
    return typer.Argument(help=f"One of {', '.join(choices)}.{more}", metavar="OP", autocompletion=completion(choices))


Device = Annotated[str, words("auto takes cuda if available.", "auto", "cpu", "cuda")]
Framework = Annotated[str | None, words("Default: torch if it is installed.", "torch", "jax")]


def flag(name: str) -> str:
    """The option of an argument."""
    return f"--{name.replace('_', '-')}"


@contextmanager
def naming_options(*arguments: str, **flags: str) -> Iterator[None]:
    """A ValueError of a function is one of the command around it: it names arguments as options."""
    known = {name: flag(name) for name in arguments} | flags
    names = "|".join(sorted(known, key=len, reverse=True))
    before = "|".join(f"(?<={words} )" for words in (":", ",", "give", "leave", "and", "or", "no", "but", "as"))
    pattern = rf"(?:{before})({names})(?=,|;|=|$| (?:must|is|are|and|or|out)\b)"
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(pattern, lambda found: known[found[1]], str(error))) from error


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def matching(option: str, patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that match a pattern, in their own order.

    Raises:
        ValueError: a pattern of `option` matches none.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            commas = any("," in name for name in names)
            there = "".join(f"\n  {name}" for name in names) if commas else f" {', '.join(names)}"
            raise ValueError(f"{option} {pattern!r} matches nothing; there is:{there}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def known_op(op: str, known: Collection[str]) -> None:
    """Raise ValueError for an op that is not among those `known`."""
    if op not in known:
        raise ValueError(f"no op {op!r}; there is: {', '.join(known)}")
