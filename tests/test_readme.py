"""README.md and CONTRIBUTING.md say only what is true: their code runs, their commands and files exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from launch import SOURCE

ROOT = SOURCE.parent
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    inline = [code for page in PAGES for code in re.findall(r"`((?:make|python|pip|mpiexec) [^`]*)`", PAGES[page])]
    return sorted({line.split("#")[0].strip() for line in [*lines, *inline]} - {""})


@pytest.mark.parametrize("block", blocks("README.md", "python"))
def test_python_code_runs(block):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", block]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("command", commands())
def test_shell_command_is_one_that_make_or_ci_runs(command):
    makefile = (ROOT / "Makefile").read_text()
    if command.startswith("make "):
        target = command.split()[1]
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no {target}"
    elif command.startswith("pip install "):
        extras = re.search(r"\[(.*)\]", command)[1].split(",")
        table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
        assert set(extras) <= set(re.findall(r"^(\w+) =", table, re.MULTILINE))
        assert set(extras) <= set(re.findall(r"\w+", (ROOT / ".ci" / "run").read_text()))
    elif command.startswith("python -m thdattn "):
        assert f'"$$python" {command.removeprefix("python ")}' in makefile
    elif command.startswith("mpiexec "):
        program = re.match(r"mpiexec -n \d python -m mpi4py (\S+)", command)[1]
        starters = makefile + (ROOT / "tools" / "demo.py").read_text()
        assert program in starters and (ROOT / program).exists()
        started = '"-n", str(processes), sys.executable, "-m", "mpi4py", program'
        assert started in (ROOT / "tools" / "start.py").read_text()
    elif command.startswith("python examples/bytelm/sample.py "):
        assert "examples/bytelm/sample.py" in (ROOT / "tools" / "demo.py").read_text()
    else:
        assert command == ".ci/run", f"{command} is neither in the Makefile nor in .ci/run"


@pytest.mark.parametrize("program", ["packed_documents.py", "bytelm/train.py", "bytelm/sample.py"])
def test_options_of_the_examples_exist(program):
    target = {"packed_documents.py": "make tutorial", "bytelm/train.py": "make demo"}.get(program, "no target")
    mine = [command for command in commands() if f"examples/{program}" in command or command.startswith(target)]
    used = {option for command in mine for option in re.findall(r"--[a-z-]+", command)}
    source = (ROOT / "examples" / program).read_text()
    assert used
    for option in used:
        assert f'"{option}"' in source


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_exist(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]) if "://" not in link]
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", PAGES[page], re.MULTILINE)}
    for link in links:
        path, _, heading = link.partition("#")
        assert (ROOT / path).exists(), f"{page} links to {link}"
        assert not heading or heading in headings, f"{page} links to its heading {heading}"


def test_ci_installs_every_extra_it_needs_and_runs_the_test_command():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "[cuda13,mpich,examples,test,lint,docs,torch,jax]" in ci
    assert re.search(r"^step make test ", ci, re.MULTILINE)


def test_head_dims_of_the_readme_are_those_of_the_kernels():
    from thdattn.tiles import TILES

    (row,) = re.findall(r"^\| head dims \| CUDA: (.*?); reference", PAGES["README.md"], re.MULTILINE)
    alike = {int(number) for number in re.findall(r"\d+", row.split(" and ")[0])}
    assert {(d, d) for d in alike} | {(192, 128)} == set(TILES)
