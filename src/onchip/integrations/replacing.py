"""Replace a library's functions by onchip's in each of its loaded modules that holds them, and restore them."""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Installed:
    """What `install` did; `print` shows it, a name a line."""

    version: str
    """Of the library."""
    replaced: tuple[str, ...]
    """The names that are onchip's now, such as "trl.trainer.utils._ChunkedLogProbFunction"."""
    trainers: tuple[str, ...] = ()
    """For TRL, the trainers whose losses go through these, such as "trl.SFTTrainer"."""
    what: str = field(default="", kw_only=True, repr=False)
    """What runs through onchip."""

    def __str__(self) -> str:
        parts = [f"{self.what} runs through onchip, which replaced", *(f"  {name}" for name in self.replaced)]
        return "\n".join([*parts, *(["for"] if self.trainers else []), *(f"  {name}" for name in self.trainers)])


class Ours(NamedTuple):
    """onchip's replacement for one of a library's functions or classes."""

    home: str
    """The module that defines the library's own."""
    value: Any
    parameters: tuple[str, ...]
    """The parameters of the library's own, as far as onchip knows."""
    function: Callable[[Any], Any] = lambda found: found
    """The library's function that has these parameters."""


@dataclass(frozen=True)
class Replacing:
    """onchip's replacements in a library, by name; that of a method has its class's before it."""

    package: str
    remedy: str
    ours: Mapping[str, Ours]
    originals: dict[str, Any] = field(default_factory=dict)
    """The library's own, since `install`."""
    warned: set[str] = field(default_factory=set)
    """The reasons that were given for running them."""

    def install(self, library: str) -> tuple[str, ...]:
        """Put in onchip's replacements, and return the names that are onchip's now.  `library`: its name and version.

        Raises:
            RuntimeError: a function isn't there, takes other arguments, or was replaced by something else.  Then
                nothing is replaced.
        """
        self.originals.update({name: self._found(library, name) for name in self.ours})
        for name, ours in self.ours.items():
            self._set(name, self.originals[name], ours.value)
        return tuple(f"{x}.{name}" for name, ours in self.ours.items() for x in self._holders(name, ours.value))

    def uninstall(self) -> None:
        """Restore the library's own; without an earlier `install` it does nothing."""
        for name, original in self.originals.items():
            self._set(name, self.ours[name].value, original)
        self.warned.clear()

    def original(self, name: str, reason: str, library: str) -> Any:
        """The library's own; the first time, warn of the reason, at the caller's caller."""
        if reason not in self.warned:
            self.warned.add(reason)
            said = f"onchip.integrations.{self.package}: {library}'s own {name} runs, because {reason}"
            warnings.warn(said, stacklevel=3)
        return self.originals[name]

    def _found(self, library: str, name: str) -> Any:
        """The library's own under this name; raise unless its arguments are those that onchip knows."""
        ours, said = self.ours[name], f"onchip.integrations.{self.package}: "
        place = f"{ours.home}.{name}"
        try:
            found = _named(importlib.import_module(ours.home), name)
        except ModuleNotFoundError as error:
            if not ours.home.startswith(str(error.name)):  # what the library itself lacks
                raise
            found = None
        if found is ours.value:
            return self.originals[name]
        function = None if found is None else ours.function(found)
        if function is None:
            raise RuntimeError(f"{said}{library} has no {place}; {self.remedy}")
        if not str(function.__module__).startswith(f"{self.package}."):
            raise RuntimeError(f"{said}{place} was replaced by {function.__module__}; undo that first")
        parameters = tuple(name for name in inspect.signature(function).parameters if name not in ("ctx", "self"))
        if parameters != ours.parameters:
            raise RuntimeError(
                f"{said}{place} of {library} takes ({', '.join(parameters)}), but onchip knows it with "
                f"({', '.join(ours.parameters)}); {self.remedy}"
            )
        return found

    def _holders(self, name: str, value: Any) -> list[str]:
        """The library's loaded modules in which `name` is `value`."""
        modules = [key for key in sorted(sys.modules) if key.split(".")[0] == self.package]
        return [key for key in modules if _named(sys.modules[key], name) is value]

    def _set(self, name: str, before: Any, value: Any) -> None:
        """Let `name` be `value` wherever it was `before`."""
        owner, _, last = name.rpartition(".")
        for key in self._holders(name, before):
            setattr(_named(sys.modules[key], owner) if owner else sys.modules[key], last, value)


def _named(found: Any, name: str) -> Any:
    """What a module has of this name, or None; what it makes when it is asked isn't made."""
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found
