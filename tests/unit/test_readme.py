"""Pages of the documentation: their code runs, and their commands, options, links and error messages exist."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import SOURCE, mpiexec, run_ranks, run_torchrun

ROOT = SOURCE.parent
DOCS = sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", *DOCS)}
SLURM = ROOT / "examples" / "slurm.sh"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    inline = [code for page in PAGES for code in re.findall(r"`((?:make|python|pip|mpiexec) [^`]*)`", PAGES[page])]
    return sorted({" ".join(line.split("#")[0].split()) for line in [*lines, *inline]} - {""})


@pytest.mark.parametrize("block", [
    pytest.param(block, id=f"{page}-{number}") for page in PAGES if page != "docs/coming_from.md"  # test_coming_from.py
    for number, block in enumerate(blocks(page, "python")) if "torch.distributed" not in block
])
def test_python_code_runs_and_prints_a_line(block):
    for library in re.findall(r"^import (torch|jax)$", block, re.MULTILINE):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", block]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("\n") == 1, run.stdout


def test_python_code_for_torch_distributed_runs(tmp_path):
    (block,) = [block for block in blocks("README.md", "python") if "torch.distributed" in block]
    (tmp_path / "program.py").write_text(block)
    run = run_torchrun(2, tmp_path / "program.py", timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("one step on 2 ranks") and run.stdout.count("\n") == 1


def test_the_quick_start_is_the_example_and_prints_what_the_page_shows():
    example = ROOT / "examples" / "quick_start.py"
    block, (shown,) = blocks("README.md", "python")[0], blocks("README.md", "text")
    assert example.read_text().endswith(f'"""\n\n{block}')
    run = run_ranks(2, example)
    assert run.returncode == 0, run.stderr
    if "'reference'" in run.stdout:
        assert run.stdout == shown


@pytest.mark.parametrize("command", commands())
def test_goals_extras_programs_and_options_of_commands_exist(command):
    makefile = (ROOT / "Makefile").read_text()
    command = re.sub(r"^(mpiexec -n \d+|srun --mpi=\w+) (?=python -m thdattn )", "", command)
    if command.startswith("make "):
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)
    elif command.startswith("pip install "):
        table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
        assert set(re.search(r"\[(.*)\]", command)[1].split(",")) <= set(re.findall(r"^(\w+) =", table, re.MULTILINE))
    elif command.startswith("python -m thdattn "):
        assert f'"{command.split()[3]}"' in (SOURCE / "thdattn" / "__main__.py").read_text()
    else:
        (program,) = re.findall(r"\S+\.(?:py|sh)|^\.ci/run$", command)
        assert (ROOT / program).exists()


@pytest.mark.parametrize(("program", "goal"), [
    ("examples/packed_documents.py", "make tutorial"), ("examples/bytelm/train.py", "make demo"),
    ("examples/bytelm/sample.py", "no goal"), ("src/thdattn/cli/pack_stats.py", "make pack-stats"),
    ("src/thdattn/cli/advise.py", "make advise"),
])
def test_options_of_programs_exist(program, goal):
    mine = [command for command in commands() if program in command or command.startswith(goal)]
    used = {option for command in mine for option in re.findall(r"--[a-z-]+", command)}
    source = (ROOT / program).read_text() + (SOURCE / "thdattn" / "cli" / "options.py").read_text()
    for option in used:
        assert f'"{option}"' in source


def test_the_slurm_script_trains_on_the_tasks_of_the_job(tmp_path):
    mpiexec(2)  # skips where there is none
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    sbatch, options = {}, ["--size", "tiny", "--steps", "1", "--tokens", "64", "--val-bytes", "200",
                           "--checkpoint", str(tmp_path)]
    for name, value in re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", SLURM.read_text(), re.MULTILINE):
        sbatch[name] = value
    assert sbatch["ntasks-per-node"] == sbatch["gpus-per-node"]  # one rank per GPU
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NTASKS": "2", "PATH": path, "PYTHONPATH": str(SOURCE)}
    command = ["bash", str(SLURM), *options]
    run = subprocess.run(command, env=os.environ | job, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0 and "ranks: 2" in run.stdout, run.stdout + run.stderr
    assert (tmp_path / "checkpoint.npz").exists()


def texts():
    """Yield every string of the sources, with … for each inserted value."""
    for path in (SOURCE / "thdattn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def errors():
    """Return the messages that README's troubleshooting quotes: all code in the left column."""
    section = PAGES["README.md"].split("\n## Troubleshooting\n")[1].split("\n## ")[0]
    return [text for row in re.findall(r"^\| (.*?) \| ", section, re.MULTILINE) for text in re.findall(r"`(.+?)`", row)]


def test_errors_that_the_readme_explains_are_those_that_the_code_raises():
    raised = [*texts()]
    for message in errors():
        pattern = "".join(".+" if part == "…" else re.escape(part) for part in re.split("(…)", message))
        assert any(re.search(pattern, text) for text in raised), message


def test_every_folder_and_module_is_in_the_table_of_where_things_are():
    links = re.findall(r"\]\((src/thdattn/[^)]+)\)", (ROOT / "CONTRIBUTING.md").read_text())
    for path in (SOURCE / "thdattn").iterdir():
        if not path.name.startswith("__") and path.name != "py.typed":
            assert str(path.relative_to(ROOT)) in links, f"CONTRIBUTING.md lacks {path}"


def headings(page):
    return {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_exist(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]) if "://" not in link]
    for link in links:
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        assert not heading or heading in headings(target.read_text()), f"{page} links to its heading {heading}"


def test_head_dims_of_the_readme_are_those_of_the_kernels():
    from thdattn.kernels.configs import TILES

    (row,) = re.findall(r"^\| head dims \| CUDA: (.*?); reference", PAGES["README.md"], re.MULTILINE)
    alike = {int(number) for number in re.findall(r"\d+", row.split(" and ")[0])}
    assert {(d, d) for d in alike} | {(192, 128)} == set(TILES)
