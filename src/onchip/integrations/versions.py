"""Which version of a training stack an integration knows."""

import re
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def require(integration: str, distribution: str, version: str) -> str:
    """The installed version of a stack.

    Args:
        integration: the module of `onchip.integrations` that asks.
        distribution: the stack's name for pip.
        version: the version for whose interface the integration was written, as far as it matters: "0.3" or "0.9.5".

    Raises:
        ModuleNotFoundError: the stack isn't installed.
        RuntimeError: it is another version.
    """
    remedy = f"pip install '{distribution}=={version}.*'"
    try:
        found = installed_version(distribution)
    except PackageNotFoundError:
        raise ModuleNotFoundError(
            f"onchip.integrations.{integration}: {distribution} isn't installed; {remedy}", name=distribution
        ) from None
    known = _numbers(version)
    if _numbers(found)[: len(known)] != known:
        raise RuntimeError(
            f"onchip.integrations.{integration}: this is {distribution} {found}, but onchip knows the interface of "
            f"{distribution} {version}; {remedy}"
        )
    return found


def _numbers(version: str) -> list[int]:
    """Of a release: 0.9.5.dev1 is one of 0.9.5."""
    return [int(x) for x in re.findall(r"\d+", version.split("+")[0])]
