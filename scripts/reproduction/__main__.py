"""Test the papers' claims and write the result pages. Run by scripts/reproduce.

A claim that already has a result is skipped, so an interrupted run can be resumed; real trainings are cached one by
one. The pages depend on the results alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reproduction import common, page, running

ROOT = Path(__file__).resolve().parents[2]
NAMES = ", ".join((*common.CLAIMS, *common.ON_DEMAND))


def main() -> int:
    args = parse_arguments()
    claims = args.claims or common.CLAIMS
    running.keep_in(args.output / "runs")
    if args.again:
        for claim in claims:
            running.forget(claim)
    for claim in claims:
        path = args.output / f"{claim}.json"
        result = common.load(path)
        if result is not None and result["size"] == args.size and not args.again and args.only is None:
            print(f"reproduce: {claim}: {path} exists (--again measures it again)")
            continue
        print(f"reproduce: {claim}", flush=True)
        before, result = result, common.run_study(claim, args.size, args.only)
        if args.only == [] and before is not None and before["size"] == args.size:
            # Nothing was measured, so the machine and the time stay those of the measurements.
            result = {**before, "version": result["version"], "figures": result["figures"]}
        common.save(result, path)
        print(f"reproduce:     done in {result['seconds']:.0f} s")
        for verdict in common.verdicts_of(claim, result["figures"]):
            print(f"reproduce:     {page.outcome(verdict.holds)}: {verdict.statement} ({verdict.evidence})")
    for path in page.write(args.output):
        print(f"reproduce: {path}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reproduce", description=(__doc__ or "").split(". ")[0])
    parser.add_argument(
        "claims",
        nargs="*",
        metavar="CLAIM",
        help=f"some of {NAMES} (all but {', '.join(common.ON_DEMAND)})",
    )
    parser.add_argument(
        "--again", action="store_true", help="measure claims again that already have a result"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="PART",
        help=f"for a claim with parts ({common.WITH_PARTS}): run only these, in this order; the pages show the "
        "others as measured before, here or on another machine. Without any PART: only rewrite the pages",
    )
    parser.add_argument(
        "--size", choices=("full", "tiny"), default="full", help="tiny: a check that it runs (default: full)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for results, plots and pages; the summary is FOLDER.md (default: docs/results, "
        "or build/results with --size tiny)",
    )
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    for claim in args.claims:
        if claim not in (*common.CLAIMS, *common.ON_DEMAND):
            parser.error(f"{claim}: unknown claim; choose from {NAMES}")
        find_problem = getattr(common.module_of(claim), "problem", None)
        problem = None if find_problem is None else find_problem(args.size)
        if problem:
            parser.error(f"{claim}: {problem}")
    if args.output is None:
        args.output = ROOT / ("docs" if args.size == "full" else "build") / "results"
    if args.only is not None:
        if args.again:
            parser.error("--again measures all parts of a claim: leave out --only")
        parts = getattr(common.module_of(args.claims[0]), "PARTS", ()) if len(args.claims) == 1 else ()
        if not parts:
            parser.error(f"--only: name one claim that has parts: {common.WITH_PARTS}")
        for part in args.only:
            if part not in parts:
                parser.error(f"--only {part}: choose from {', '.join(parts)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
