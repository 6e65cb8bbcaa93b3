"""Check the package on a GPU, and write a report: see scripts/gpu-check.

Each part runs in separate processes with a time limit. The files report.json, report.md and logs.tar.gz are written
anew after each step, so a run that is cut off leaves all that was finished.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_checks import machine, parts, wheels
from gpu_checks.running import Runner

LIMIT, REHEARSAL_LIMIT = 360, 1200
SHORTEST = 20


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description="Check the package on a GPU.",
        epilog="Parts: " + "; ".join(f"{name}: {what}" for name, what in parts.TITLES.items()),
    )  # fmt: skip
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", default=list(parts.TITLES), help="these parts (all)")
    add("--limit", type=float, metavar="SECONDS",
        help=f"time for everything ({LIMIT}; for a rehearsal {REHEARSAL_LIMIT})")  # fmt: skip
    add(
        "--out",
        type=Path,
        default=Path("gpu-check"),
        metavar="FOLDER",
        help="folder of the report (gpu-check)",
    )
    add("--wheels", type=Path, metavar="FOLDER", help="folder with Horovod's wheels: nccl/*.whl, built with NCCL, and "
        "host/*.whl, built without; *.whl beside them are what all parts need")  # fmt: skip
    add(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="Triton's folder of compiled kernels, kept (a temporary one)",
    )
    add("--rehearse", action="store_true", help="at a tiny size on the CPU, in Triton's interpreter")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    unknown = [name for name in args.only if name not in parts.TITLES]
    if unknown:
        parser.error(f"--only {unknown[0]}: use some of {', '.join(parts.TITLES)}")
    if args.limit is None:
        args.limit = REHEARSAL_LIMIT if args.rehearse else LIMIT
    if not SHORTEST <= args.limit < math.inf:
        parser.error(f"--limit {args.limit:g}: use at least {SHORTEST} seconds")
    if args.wheels is not None:
        problem = wheels.problem(args.wheels)
        if problem:
            parser.error(f"--wheels {args.wheels}: {problem}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / ".partial").touch()
        (args.out / ".partial").unlink()
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; use a folder that can be written to")
    return args


def stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, stop)
    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        runner = Runner(args.out, work, args.limit, args.rehearse, args.cache)
        problem = wheels.install_for_all(args.wheels, work / "all", runner.environment) if args.wheels else ""
        problem = problem or machine.describe(runner)
        if problem:
            print(f"gpu-check: error: {problem}", file=sys.stderr)
            return 2
        horovods = wheels.install(args.wheels, work, runner.report.data["machine"])
        chosen = [part for part in parts.plan(work, args.rehearse) if part.name in args.only]
        runner.run(chosen, horovods)
        return runner.finish()
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
