"""Programs accept the commands in README.md and docs; every link leads somewhere."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_lines import NOT_ASKED, PROGRAM, Asked

from horovod_quant.frontends import methods

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("results/*.md")),
]


FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> list[Asked]:
    """A page's commands: without comments, and each in one line."""
    rest = FENCED.sub("", page)
    return [
        *(Asked(text, True) for text in (*fenced_commands(page), *indented_commands(rest))),
        *(Asked(text, False) for text in inline_commands(rest)),
    ]


def fenced_commands(page: str) -> list[str]:
    found = []
    for indent, language, block in FENCED.findall(page):
        if language not in ("sh", "bash", "console"):
            continue
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        if language == "console":
            lines = [line[2:] for line in lines if line.startswith("# ")]
        for line in lines:
            command = " ".join(re.sub(r"(^|\s)#\s.*", "", line.removeprefix(indent)).split())
            if command:
                found.append(command)
    return found


def starts_with_program(text: str) -> bool:
    words = [word for word in text.split() if not re.match(r"\w+=", word)]
    return bool(words) and (words[0] in ("mpirun", "srun", "sbatch") or bool(PROGRAM.fullmatch(words[0])))


def indented_commands(rest: str) -> list[str]:
    lines = re.findall(r"^ {4,}(\S.*)$", re.sub(r"\\\n\s*", " ", rest), re.MULTILINE)
    return [line for line in lines if starts_with_program(line)]


def inline_commands(rest: str) -> list[str]:
    """Those with an argument; ``scripts/test`` alone is a name."""
    found = []
    for part in re.split(r"\n\s*\n|\n(?=[|-])", re.sub(r"``.*?``", "", rest)):
        texts = [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", part)]
        found += [text for text in texts if starts_with_program(text) and text not in NAMES and " " in text]
    return found


NAMES = {"horovod-quant doctor", "horovod-quant bench", "horovod-quant advise", "pip install"}


def asked_in(page: Path) -> list[Asked]:
    """Of the pages of results only what they say of scripts/reproduce: the rest tells what has been run."""
    found = commands_of(page.read_text())
    results = page.name == "results.md" or page.parent.name == "results"
    return [each for each in found if not results or each.text.startswith("scripts/reproduce")]


ASKED = [(page.name, each) for page in PAGES for each in asked_in(page)]
IN_PAGES = {each.text: page for page, each in ASKED}


def test_commands_are_found_wherever_they_stand() -> None:
    page = (
        "Type `horovod-quant\nbench --model a`:\n\n    pip install b\n\n| a | `scripts/lab up 4` |\n\n"
        "```sh\nmake \\\n  c # d\n```\n"
    )
    assert commands_of(page) == [
        Asked("make c", True),
        Asked("pip install b", True),
        Asked("horovod-quant bench --model a", False),
        Asked("scripts/lab up 4", False),
    ]


def test_many_commands_are_found() -> None:
    assert len(IN_PAGES) > 80


# ---- would the programs accept them? --------------------------------------------------------------------------------

MISTAKES = {
    "horovodrun -np 2 horovod-quant doctor --modl resnet50": "unrecognized arguments: --modl",
    "horovodrun -np 2 --glo horovod-quant doctor": "unrecognized arguments: --glo",
    "python examples/torch_digits.py --compression qsdg": "invalid choice: 'qsdg'",
    "python examples/terngrad.py --clp 3": "unrecognized arguments: --clp",
    "python examples/minimal_torch.py EDN": "not a class",
    "horovodrun -np 2 python examples/gone.py": "there is no examples/gone.py",
    "scripts/lab exec host1 python benchmarks/exchange.py --grops 4": "unrecognized arguments: --grops",
    "scripts/lab pu 4": "no command pu",
    "scripts/reproduce rotated-su": "no claim rotated-su",
    "horovod-quant bench --methods globl-qsgd-8": "there is no method 'globl-qsgd-8'",
    "scripts/demo --seeds x": "invalid int value: 'x'",
    "scripts/test --al": "--al is not in its text",
    "VENV=.venv-gpu scripts/setup --gpu=hots": "--gpu=hots is not in its text",
    "pip install --no-dps triton": "no such option: --no-dps",
    "pip install 'horovod-quant[bench]'": "in no registry",
    "unheard-of --option": "nothing is known about unheard-of",
}
"""What must be noticed, so that the test below cannot pass for nothing."""

OPTIONS_OF_OTHERS = {
    "--nodes": "of sbatch",
    "--ntasks-per-node": "of sbatch",
    "--inplace": "of setuptools",
}


@cache
def answers() -> dict[str, Any]:
    """Of the programs' parsers: what is wrong with each command, then with each mistake; and all options."""
    asked = [*(each for _, each in ASKED), *(Asked(text, True) for text in MISTAKES)]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "command_lines.py"],
        input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_programs_parsers_accept_every_command() -> None:
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    wrong = [
        f"{page}: {each.text}: {found}" for (page, each), found in zip(ASKED, answers()["problems"]) if found
    ]
    assert not wrong, "\n".join(wrong)


def test_mistakes_in_commands_are_noticed() -> None:
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    for (text, expected), found in zip(MISTAKES.items(), answers()["problems"][len(ASKED) :]):
        assert expected in found, text


def options_in(page: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page))


def test_every_option_that_a_page_names_is_some_programs() -> None:
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    known = {*answers()["options"], *OPTIONS_OF_OTHERS}
    wrong = {page.name: options_in(page.read_text()) - known for page in PAGES}
    assert not {name: found for name, found in wrong.items() if found}
    assert options_in("`bench --modl x`, --many-small, a -- b, c--d") - known == {"--modl"}


@pytest.mark.parametrize("program", NOT_ASKED)
def test_what_is_not_asked_is_in_the_pages(program: str) -> None:
    assert any(f" {program} " in f" {text} " or text.startswith(program) for text in IN_PAGES)


def anchors(page: str) -> set[str]:
    """Of a page's headings, as forges make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_the_kubernetes_job_starts_what_mpirun_starts() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "examples" / "cluster" / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    workers = replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    options = [
        "--bind-to none --map-by slot",
        "-mca pml ob1 -mca btl ^openib",
        "-x PATH",
        "-x OMP_NUM_THREADS",
    ]
    script = (ROOT / "examples" / "cluster" / "mpirun.sh").read_text()
    words = " ".join([*launcher["command"], *launcher["args"]])
    assert words.startswith(f"mpirun -np {workers} ")
    assert all(option in words and option in script for option in options)
    # The script finds Open MPI's folder where it runs; the image knows it.
    assert "-x OPAL_PREFIX" in words
    assert "OPAL_PREFIX=" in script
    assert "OPAL_PREFIX=" in (ROOT / "examples" / "cluster" / "Dockerfile").read_text()
    assert (ROOT / launcher["args"][launcher["args"].index("python") + 1]).exists()


def test_the_install_page_is_run_as_it_stands() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    script = ROOT / "scripts" / "test-install-page"
    marks = re.findall(r"^<!-- (\w+) -->$", page, re.MULTILINE)
    assert len(marks) == 3
    for mark in marks:
        shown = subprocess.run([script, "--print", mark], capture_output=True, text=True, check=True).stdout
        assert f"<!-- {mark} -->\n```sh\n{shown}```\n" in page
        assert " pip install --no-cache-dir --no-build-isolation" in shown
    every = subprocess.run([script, "--print"], capture_output=True, text=True)
    assert (every.returncode, every.stderr[:24]) == (2, "test-install-page: print")
    unknown = subprocess.run([script, "mxnet"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "mxnet: there are no such commands; use " + " ".join(marks) in unknown.stderr


def test_the_release_checklist_and_the_script_agree() -> None:
    """The version and the changelog's first section are compared by both; and both say what a registry needs."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert setup["metadata"]["version"] == sections[0]
    script = (ROOT / "scripts" / "release").read_text()
    checklist = (ROOT / "CONTRIBUTING.md").read_text().partition("## A release\n")[2].partition("\n## ")[0]
    for named in ("auditwheel", "numpy", "Missing for a registry", "absolute links in README.md"):
        assert named.lower() in " ".join(checklist.split()).lower()
        assert named.lower() in script.lower()
    assert all(name in script for name in ("setup.cfg", "CHANGELOG.md", "unreleased"))


def test_scripts_name_tests_that_exist() -> None:
    named = {
        (path.name, found)
        for path in (ROOT / "scripts").iterdir()
        if path.is_file()
        for found in re.findall(r"\btests/[\w/]+(?:\.py)?(?![\w{*])", path.read_text())
    }
    assert ("test-horovod", "tests/pytorch") in named
    assert not [(script, path) for script, path in named if not (ROOT / path).exists()]


def test_the_names_of_methods_mean_what_their_page_says() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| `(hv[dq]\..+)` \|$", (DOCS / "methods.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 10
    assert {name: methods.parse(name).code() for name, _ in rows} == dict(rows)


def test_both_lists_of_papers_are_read_and_agree() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    cited = {
        paper["title"]: [(author["family-names"], author["given-names"]) for author in paper["authors"]]
        for paper in citation["references"]
    }
    listed = {}
    for entry in re.split(r"^@", (DOCS / "papers.bib").read_text(), flags=re.MULTILINE)[1:]:
        kind, fields = re.fullmatch(r"(\w+)\{[\w-]+,\n(.*)\n\}\n*", entry, re.DOTALL).groups()  # type: ignore[union-attr]
        assert kind in ("inproceedings", "article", "misc")
        found = dict(re.findall(r"^  (\w+) = \{(.*?)\},?$", fields, re.MULTILINE | re.DOTALL))
        authors = re.sub(r"\{\\'(\w)\}", lambda match: {"a": "á"}[match[1]], found["author"])
        listed[re.sub("[{}]", "", found["title"])] = [
            tuple(" ".join(name.split()).split(", ")) for name in re.split(r"\s+and\s+", authors)
        ]
    assert listed == cited
    assert citation["authors"]
