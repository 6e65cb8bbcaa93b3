"""Asks programs about command lines: would the program's own parser accept it? Runs none of them.

    python tests/command_lines.py < command lines, as JSON > what is wrong with each, and all options

A process of its own: examples, benchmarks and scripts have modules of the same names, and examples/terngrad.py
registers a scheme.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from horovod_quant.frontends.methods import parse
from horovod_quant.schemes import registry

ROOT = Path(__file__).resolve().parent.parent

NOT_ASKED = {
    "apt-get": "not ours",
    "git": "not ours",
    "printf": "not ours",
    "echo": "not ours",
    "chmod": "not ours",
    "export": "a variable of the shell",
    ".": "activates an environment",
    "docker": "not ours, and not installed here",
    "kubectl": "as above",
    "sbatch": "as above; the script and the command after its options are asked",
    "srun": "as above",
    "python examples/explained.py": "takes no options: cells of a notebook",
    "python tests/test_language.py": "takes no options",
    "python -m": "pytest's own options; whether its files exist is looked at",
    "python setup.py": "setuptools' own, which scripts/setup uses, too",
    "python train.py": "stands for a script of yours",
}
"""Programs that nothing asks, and why."""

LAUNCHERS = ("horovodrun", "torchrun")

STARTERS = ("sbatch", "srun")
"""Those of them that start the command that follows."""

PARSERS = {
    "horovod-quant": "horovod_quant/cli/main.py",
    "benchmarks/alltoalls.py": "benchmarks/alltoalls.py",
    "benchmarks/auto.py": "benchmarks/auto.py",
    "benchmarks/exchange.py": "benchmarks/exchange.py",
    "benchmarks/gpu_host.py": "benchmarks/gpu_host.py",
    "benchmarks/correlated_rounding.py": "benchmarks/correlated_rounding.py",
    "benchmarks/kernels.py": "benchmarks/kernels.py",
    "examples/terngrad.py": "examples/terngrad.py",
    "examples/torch_char_transformer.py": "examples/torch_char_transformer.py",
    "scripts/advise-tables": "scripts/advise_tables.py",
    "scripts/docs": "scripts/documentation.py",
    "scripts/check-model": "scripts/check_model.py",
    "scripts/compile_kernels.py": "scripts/compile_kernels.py",
    "scripts/demo": "scripts/demonstration.py",
    "scripts/gpu-check": "scripts/gpu_check.py",
    "scripts/reproduce": "scripts/reproduction/__main__.py",
}
"""Programs whose options are in a function ``make_parser`` of a file."""

ONE_WORKER = SimpleNamespace(rank=lambda: 0, size=lambda: 1, allgather_object=lambda value: [value])
"""What the examples' parsers want of Horovod, to complain once."""

PROGRAM = re.compile(
    r"horovodrun|torchrun|horovod-quant|python3?|pip|scripts/[\w-]+|benchmarks/\w+\.py|examples/[\w/]+\.(py|sh|sbatch)"
)


HARNESS = re.compile(r"(\w*digits|synthetic)\.parse_arguments\(\"(\w+\.py)\"")
"""In an example whose parser another file makes."""


class Asked(NamedTuple):
    """A command line.

    Attributes:
        whole: as one would type it; otherwise what it needs besides may be missing.
    """

    text: str
    whole: bool


def problem(asked: Asked) -> str:
    """What is wrong with a command line; nothing if all is well."""
    words = shlex.split(re.sub(r"\s(&|> ?\S+)$", "", asked.text))
    for word in words:
        if re.match(r"(scripts|benchmarks|examples|tests|docs)/\w", word) and not (ROOT / word).exists():
            return f"there is no {word}"
    starts = [number for number, word in enumerate(words) if PROGRAM.fullmatch(word)]
    starts = [number for number in starts if number - 1 not in starts or words[number - 1][:6] != "python"]
    before = [word for word in words[: starts[0] if starts else None] if not re.match(r"\w+=", word)]
    if before and before[0] not in STARTERS:
        return "" if before[0] in NOT_ASKED else f"nothing is known about {before[0]}"
    for begin, end in zip(starts, [*starts[1:], None]):
        found = of_program(words[begin:end], asked.whole)
        if found:
            return found
    return ""


def of_program(words: list[str], whole: bool) -> str:
    program, *arguments = words
    if program.startswith("python"):
        if not arguments or " ".join(["python", arguments[0]]) in NOT_ASKED:
            return ""
        program, *arguments = arguments
    if program == "pip":
        return of_pip(arguments)
    if program == "torchrun":  # whose script is another program here
        arguments = [*arguments, "script"]
    text = source(program)
    if program in PARSERS or program in LAUNCHERS or HARNESS.search(text):
        return of_parser(parser_of(program), program, arguments, whole)
    if program.endswith(".py") and "sys.argv[1]" in text:
        return of_example(arguments)
    if text.startswith("#!"):
        return of_shell_script(program, arguments, text)
    return f"nothing is known about {program}"


def source(program: str) -> str:
    path = ROOT / program
    return path.read_text() if path.is_file() else ""


def of_parser(parser: argparse.ArgumentParser, program: str, arguments: list[str], whole: bool) -> str:
    # Horovod looks at once at what it was built with; the option is there.
    if program == "horovodrun" and "--check-build" in arguments:
        return ""
    for own in with_commands(parser):
        own.allow_abbrev = False
        if not whole:
            for action in (*own._actions, *own._mutually_exclusive_groups):
                action.required = False
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            given = parser.parse_args(arguments)
    except SystemExit as ended:
        return said.getvalue().strip().splitlines()[-1] if ended.code else ""
    for name in (getattr(given, "methods", None) or ()) if whole else ():
        try:
            parse(name)
        except ValueError as error:
            return f"--methods: {error}"
    claims = getattr(given, "claims", ()) if program == "scripts/reproduce" else ()
    common = importlib.import_module("reproduction.common") if claims else None
    for claim in claims:
        if claim not in (*common.CLAIMS, *common.ON_DEMAND, "CLAIM"):
            return f"there is no claim {claim}"
    return ""


def of_pip(arguments: list[str]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _, given = pip_install().parse_args(arguments[1:])
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    ours = [word for word in given if re.match(r"horovod[-_]quant($|\[)", word)]
    return f"{ours[0]}: in no registry" if ours else "" if arguments[0] == "install" else "not pip install"


def of_example(arguments: list[str]) -> str:
    """One that takes nothing but the name of a class."""
    names = {"Auto", *(kind.__name__ for kind in registry.own())}
    return (
        ""
        if not arguments or (len(arguments) == 1 and arguments[0] in names)
        else f"{arguments}: not a class"
    )


def of_shell_script(program: str, arguments: list[str], text: str) -> str:
    """Options, and the commands of scripts/lab, stand in its text."""
    for word in arguments:
        if word.startswith("-") and not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w=-])", text):
            return f"{program}: {word} is not in its text"
    if program == "scripts/lab" and arguments and f"{program} {arguments[0]} " not in text:
        return f"{program} has no command {arguments[0]}"
    return ""


# ---- parsers ---------------------------------------------------------------------------------------------------------


@cache
def load(file: str) -> ModuleType:
    """A module by its path, with its folder's other modules."""
    path = ROOT / file
    package = path.parent.parent if path.name == "__main__.py" else path.parent
    sys.path.insert(0, str(package))
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", file), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def parser_of(program: str) -> argparse.ArgumentParser:
    if program == "horovodrun":
        return horovods_parser()
    if program == "torchrun":
        return importlib.import_module("torch.distributed.run").get_args_parser()
    if program in PARSERS:
        make: Callable[..., Any] = load(PARSERS[program]).make_parser
        return make(ONE_WORKER) if program.startswith("examples/") else make()
    found = HARNESS.search(source(program))
    assert found is not None
    harness, name = found.groups()
    return load(f"examples/{harness}.py").make_parser(name, ONE_WORKER)


def horovods_parser() -> argparse.ArgumentParser:
    """Horovod makes it where it uses it."""
    launch = importlib.import_module("horovod.runner.launch")

    class Made(Exception):
        pass

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Made(parser)

    original, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, stop  # type: ignore[assignment]
    try:
        launch.parse_args()
    except Made as made:
        made.args[0].prog = "horovodrun"
        return made.args[0]
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    raise AssertionError("horovodrun parses nothing")


@cache
def pip_install() -> Any:
    return importlib.import_module("pip._internal.commands").create_command("install")


def with_commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser, and those of its commands."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found


def options() -> set[str]:
    """All that any of our programs, a launcher or pip knows."""
    found = {option for group in pip_install().parser.option_list_all for option in group._long_opts}
    scripts = [f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")]
    trainings = [name for name in scripts if HARNESS.search(source(name))]
    for program in (*PARSERS, *LAUNCHERS, *trainings):
        for parser in with_commands(parser_of(program)):
            found |= {option for action in parser._actions for option in action.option_strings}
    for path in (ROOT / "scripts").iterdir():
        if path.is_file() and path.read_text().startswith("#!"):
            found |= set(re.findall(r"(?<!\S)--[a-z][\w-]*", path.read_text()))
    return found


def main() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != str(ROOT / "tests")]
    asked = [Asked(*each) for each in json.load(sys.stdin)]
    json.dump({"problems": [problem(each) for each in asked], "options": sorted(options())}, sys.stdout)


if __name__ == "__main__":
    main()
