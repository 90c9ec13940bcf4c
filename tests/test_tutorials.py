"""The tutorials run as they stand in docs/tutorials: commands, then Python, block after block."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    links = re.findall(r"\]\((\w+)\.md\)", (FOLDER / "README.md").read_text())
    assert sorted(links) == PAGES
