"""See the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path

import msgspec

from benchmarks.operation.report import Report, commit, this_machine, today
from swarm.errors import UserError
from swarm.terminal.output import check_writable, print_json, write_json
from tests.upgrade.older import VARIABLE

FIGURES = (
    "ageing",
    "joining",
    "month",
    "scale",
    "trusted",
    "signals",
    "dashboard",
    "upgrade",
)


def measured(figure: str) -> Report:
    """Measure one figure."""
    module = import_module(f"benchmarks.operation.{figure}")
    machine, date, began = this_machine(), today(), time.monotonic()
    result = module.measure()
    seconds = round(time.monotonic() - began, 1)
    return Report(figure, date, commit(), machine, seconds, result)


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of a swarm in operation.")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--out", type=Path, help="file to write the JSON to instead")
    parser.add_argument("--older", help="revision or folder of the older build of upgrade")
    options = parser.parse_args()
    if unknown := set(options.figures) - set(FIGURES):
        parser.error(f"there is no figure {min(unknown)!r}, only {', '.join(FIGURES)}")
    try:
        check_writable("--out", options.out)
    except UserError as error:
        parser.error(str(error))
    if options.older:
        os.environ[VARIABLE] = options.older
    reports = []
    for figure in options.figures or FIGURES:
        print(f"measuring {figure}", file=sys.stderr)
        reports.append(msgspec.to_builtins(measured(figure)))
        if options.out is not None:  # after each, so that a failure loses no earlier figure
            write_json("--out", reports, options.out)
    if options.out is None:
        print_json(reports)


if __name__ == "__main__":
    main()
