"""Options that several commands share, and the look-up of names."""

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
    """What the shell offers: the choices that begin with what is typed."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def operands(choices: Sequence[str], more: str = "") -> Any:
    """An argument that takes one or several of these names."""
    return typer.Argument(help=f"One of {', '.join(choices)}.{more}", metavar="OP", autocompletion=completion(choices))


Device = Annotated[str, words("The device to run on; auto takes cuda if available.", "auto", "cpu", "cuda")]
Framework = Annotated[str | None, words("The framework to run in. Default: torch if it is installed.", "torch", "jax")]


def flag(name: str) -> str:
    """The option for an argument of this name."""
    return f"--{name.replace('_', '-')}"


@contextmanager
def naming_options(*arguments: str, **flags: str) -> Iterator[None]:
    """Raise a function's ValueError again as one of the command that calls it, with arguments named as options."""
    known = {name: flag(name) for name in arguments} | flags
    names = "|".join(sorted(known, key=len, reverse=True))
    before = "|".join(
        f"(?<={words} )" for words in (":", ",", ";", "give", "leave", "needs", "and", "or", "no", "but", "as")
    )
    pattern = rf"(?:{before})({names})(?=,|;|=|$| (?:must|is|are|and|or|out|shares|of|in|as)\b)"
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(pattern, lambda found: known[found[1]], str(error))) from error


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def typed(name: str) -> str:
    """A name as a word that no shell wants quoted: "torch-eager-float32-logits" for "torch eager, float32 logits"."""
    return re.sub(r"[\s,]+", "-", name)


def matching(option: str, patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that match a pattern, in their own order; a name may also be given as `typed` has it.

    Raises:
        ValueError: a pattern of `option` matches none.
    """
    names = list(names)

    def matches(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or fnmatchcase(typed(name), pattern)

    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            commas = any("," in name for name in names)
            there = "".join(f"\n  {name}" for name in names) if commas else f" {', '.join(names)}"
            raise ValueError(f"{option} {pattern!r} matches nothing; choose from:{there}")
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def known_op(op: str, known: Collection[str]) -> None:
    """Raise ValueError for an op that is not among the `known` ones."""
    if op not in known:
        raise ValueError(f"no op {op!r}; choose from: {', '.join(known)}")
