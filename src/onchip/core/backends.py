"""The choice of a backend: one that the caller names is never replaced, and a refusal always says why."""

from collections.abc import Mapping, Sequence

_OTHER_NAMES = {"torch": "plain"}


def choose_backend(op: str, requested: str, refusals: Mapping[str, str | None], elsewhere: Sequence[str] = ()) -> str:
    """The backend to run: `requested`, or for "auto" the first that doesn't refuse the call.

    `refusals` maps each backend, best first, to the reason why it can't serve this call, or to None if it can.
    `elsewhere` are names that the op handles itself before it asks here; they appear in the error message.
    A backend that was named never falls back to another.  "torch" is another name for "plain".

    Raises:
        ValueError: the name is unknown, the named backend refuses, or the name is "auto" and all of them refuse.
    """
    if isinstance(requested, str) and requested == "auto":
        for name, reason in refusals.items():
            if reason is None:
                return name
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise ValueError(f"{op}: no backend can run this call ({reasons})")
    requested = named_backend(requested)
    if not isinstance(requested, str) or requested not in refusals:
        known = ", ".join(repr(name) for name in ("auto", *refusals, *elsewhere))
        raise ValueError(f"{op}: backend must be one of {known}; got {requested!r}")
    reason = refusals[requested]
    if reason is not None:
        raise ValueError(f"{op}: backend {requested!r} can't run this call: {reason}")
    return requested


def named_backend(requested: str) -> str:
    """The backend that goes by this name."""
    return _OTHER_NAMES.get(requested, requested) if isinstance(requested, str) else requested
