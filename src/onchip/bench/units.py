"""Formats numbers for people to read."""


def format_ms(ms: float | None) -> str:
    """A time in microseconds, milliseconds or seconds, to three digits."""
    if ms is None:
        return "–"
    if ms < 1:
        return f"{_three_digits(ms * 1e3)} µs"
    return f"{_three_digits(ms)} ms" if ms < 1e3 else f"{_three_digits(ms / 1e3)} s"


def format_bytes(n: int | None) -> str:
    """A size in KiB, MiB or GiB, to three digits."""
    if n is None:
        return "–"
    if n < 1 << 20:
        return f"{_three_digits(n / (1 << 10))} KiB"
    return f"{_three_digits(n / (1 << 20))} MiB" if n < 1 << 30 else f"{_three_digits(n / (1 << 30))} GiB"


def format_error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def format_ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _three_digits(x: float) -> str:
    return f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:.0f}"
