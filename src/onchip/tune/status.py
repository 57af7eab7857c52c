"""Which of an op's kernels have a tuned config on a device: what `onchip info` tells."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

from onchip.core import configs
from onchip.tune.harness import Op, one_line


def tuned_configs(tunings: Mapping[str, str], devices: Sequence[str]) -> dict[str, Any]:
    """A row for each device, op, kernel, case and dtype, and a note for each op that can't tell and why.

    Args:
        tunings: import path of each op's tuning module; one that can't be imported here is noted.
        devices: names as `configs.device_slug` makes them; of equal ones, one is looked at.
    """
    rows: list[dict[str, Any]] = []
    notes = []
    for op, module in tunings.items():
        try:
            tuning = cast(Op, import_module(module))
            for device in dict.fromkeys(devices):
                rows += _rows(op, tuning, device)
        except Exception as e:  # whatever is wrong with one op, the rest of the report goes on
            notes.append(f"{op}: {one_line(e)}")
    return {"rows": rows, "notes": notes}


def _rows(op: str, tuning: Op, device: str) -> Sequence[dict[str, Any]]:
    for folder in (configs.user_folder(), configs.SHIPPED_FOLDER):
        configs.read_entries(folder, op, device)  # raises for a broken file, which a launch passes over
    rows = []
    for kernel in tuning.KERNELS:
        for name in tuning.DEFAULT_CASES:
            case = tuning.CASES[name]
            for dtype in tuning.DTYPES:
                heuristic = tuning.candidates(kernel, case, dtype)[0]
                found = configs.find_config(op, kernel, device, dtype, tuning.sizes(case), heuristic)
                row = {"device": device, "op": op, "kernel": kernel, "case": name, "dtype": dtype}
                rows.append({**row, "how": found.how, "source": found.source, "config": dict(found.config)})
    return rows
