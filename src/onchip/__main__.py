"""The command `onchip`, which is also `python -m onchip`."""

import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        from onchip.cli import app
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in ("rich", "typer"):
            raise
        sys.exit(f"onchip: the command line needs {missing}, which is not installed; pip install 'onchip[cli]'")
    app(prog_name="onchip")


if __name__ == "__main__":
    main()
