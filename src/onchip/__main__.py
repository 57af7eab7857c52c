"""`python -m onchip` is the command `onchip`."""

from onchip.cli import app

app(prog_name="onchip")
