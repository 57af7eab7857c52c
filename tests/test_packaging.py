"""What a user of the package meets: its metadata, and what is said where a dependency is missing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import onchip

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def without(package, code):
    """Run code where a package is not installed."""
    hidden = f"import sys; sys.modules[{package!r}] = None; {code}"
    return subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)


def test_a_name_of_the_public_api_is_told_where_it_is():
    with pytest.raises(ImportError, match=r"onchip: linear_jsd is imported from onchip\.torch or onchip\.jax"):
        from onchip import linear_jsd  # noqa: F401
    with pytest.raises(ImportError, match=r"onchip: LMHead is imported from onchip\.torch"):
        onchip.LMHead  # noqa: B018
    assert not hasattr(onchip, "soft_cap")


@pytest.mark.parametrize(
    ("module", "package", "extras"),
    [
        ("onchip.torch", "torch", "torch"),
        ("onchip.jax", "jax", "jax"),
        ("onchip.integrations.transformers", "torch", "torch,integrations"),
        ("onchip.integrations.trl", "torch", "torch,integrations"),
        ("onchip.integrations.flax", "jax", "jax,integrations"),
        ("onchip.integrations.flax", "flax", "jax,integrations"),
        ("onchip.integrations.levanter", "jax", "jax"),
        ("onchip.integrations.maxtext", "flax", "jax,integrations"),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(module, package, extras):
    said = without(package, f"import {module}").stderr.splitlines()[-1]
    expected = f"{module} needs {package}, which is not installed; pip install 'onchip[{extras}]'"
    assert said == f"ModuleNotFoundError: {expected}"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_names_its_extra(package):
    done = without(package, "from onchip.__main__ import main; main()")
    needed = f"the command line needs {package}, which is not installed; pip install 'onchip[cli]'"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"onchip: {needed}\n")


def test_python_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "onchip", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: onchip " in done.stdout
    assert PROJECT["scripts"] == {"onchip": "onchip.__main__:main"}


def test_the_library_needs_no_command_line():
    assert {re.split(r"[<>=]", needed)[0] for needed in PROJECT["dependencies"]} == {"msgspec", "numpy"}


def test_every_extra_that_is_named_exists():
    sources = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        name
        for path in sources
        for found in re.findall(r"onchip\[([a-z,-]+)\]", path.read_text())
        for name in found.split(",")
    }
    assert {"torch", "jax", "cli"} <= named <= PROJECT["optional-dependencies"].keys()


def test_links_of_the_long_description_are_whole_and_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    relative = [link.split("#")[0] for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme)]
    assert relative
    assert [link for link in relative if not (ROOT / link).exists()] == []
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert hook["fragments"] == [{"path": "README.md"}]
    described = readme
    for rule in hook["substitutions"]:
        described = re.sub(rule["pattern"], rule["replacement"], described)
        assert rule["replacement"].removeprefix(r"\1").startswith("https://")
    assert not re.findall(r"\]\((?!https?:|#)", described)
    code = re.compile(r"^```.*?^```", re.M | re.S)
    assert code.findall(described) == code.findall(readme)


def test_one_address_and_one_version():
    address = PROJECT["urls"]["Repository"]
    assert all(url.startswith(address) for url in PROJECT["urls"].values())
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    name = address.removeprefix("https://github.com/")
    assert all(name in rule["replacement"] for rule in hook["substitutions"])
    assert f'version: "{onchip.__version__}"\n' in (ROOT / "CITATION.cff").read_text()
