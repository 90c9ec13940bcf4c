"""The tutorials run as they stand in docs/tutorials: commands, then Python, block after block."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import until

pytest.importorskip("torch_geometric")

FOLDER = Path(__file__).resolve().parent.parent / "docs/tutorials"
PAGES = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "README")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def run_command(line: str, folder: Path) -> None:
    """`blockstore ...`, of which the output may go to a file."""
    command, _, file = line.partition(" > ")
    words = shlex.split(command, comments=True)
    assert words[0] == "blockstore", line
    done = subprocess.run(
        [sys.executable, "-m", "preprocess", *words[1:]], cwd=folder, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if file:
        (folder / file).write_text(done.stdout)


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    blocks = BLOCK.findall((FOLDER / f"{name}.md").read_text())
    assert {language for language, _ in blocks} == {"", "python"}
    for language, text in blocks:
        if language == "python":
            exec(compile(text, f"{name}.md", "exec"), names)
            continue
        for line in text.splitlines():
            run_command(line, tmp_path)
    said = capsys.readouterr().out
    assert said
    if found := re.search(r"accuracy on test: (\d\.\d+)", said):
        assert float(found[1]) > 0.4  # of 4 classes
    if found := re.search(r"loss: (\d+\.\d+)", said):
        assert float(found[1]) < 1.2


def test_the_overview_has_every_tutorial() -> None:
    text = (FOLDER / "README.md").read_text()
    assert sorted(re.findall(r"\]\((\w+)\.md\)", text)) == PAGES
    notebooks = sorted(page.name for page in FOLDER.glob("*.ipynb"))
    assert re.findall(r"\]\(([\w-]+\.ipynb)\)", text) == notebooks


@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel, all of its cells; what it says is what readers see in it, but for decimals."""
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(FOLDER / "first-hour.ipynb", 4)
    shown = [said_in(cell) for cell in notebook.cells]
    for name, value in {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER.parent.parent),
        "XDG_RUNTIME_DIR": str(tmp_path),  # where its daemon is
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }.items():
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources=resources
    ).execute()
    said = [said_in(cell) for cell in notebook.cells]
    assert [DECIMALS.sub("?", text) for text in said] == [DECIMALS.sub("?", text) for text in shown]
    assert float(re.findall(r"test: (\d\.\d+)", "".join(said))[0]) > 0.8  # of 5 classes
    until(lambda: not list(tmp_path.glob("loaderd/*/*.door")), "its daemon has ended")


DECIMALS = re.compile(r"\d+\.\d+|[0-9a-f]{32}|hit: \d+|missed: \d+|[\d,]+(?= bytes)|read: [\d,]+")


def said_in(cell: Any) -> str:
    """The outputs of a cell of a notebook."""
    found = [o for o in cell.get("outputs", ()) if o.get("name") != "stderr"]
    return "".join(o.get("text") or o["data"]["text/plain"] for o in found)
