"""``horovod-quant COMMAND``: one module for each command, with ``add_arguments(parser)`` and ``run(arguments)``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from horovod_quant import __version__
from horovod_quant.cli import advise, bench, doctor
from horovod_quant.cli.problem import Problem, with_output, write_line

PROGRAM = "horovod-quant"
COMMANDS = {"doctor": doctor, "bench": bench, "advise": advise}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Gradient quantization for Horovod.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, module in COMMANDS.items():
        summary, _, rest = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=summary.rstrip("."),
            description=summary,
            epilog=rest.strip("\n"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    It is 2 for a wrong argument, 1 for failed output.
    """
    return with_output(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except Problem as problem:
        write_line(f"{PROGRAM} {arguments.command}: {problem}", sys.stderr)
        return 2
