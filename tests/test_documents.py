"""README and docs: every command has the options that they give it, snippets run as they stand.

Tutorials are run whole by tests/test_tutorials.py.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer.main

pytest.importorskip("torch_geometric")

from loaderd.cli.commands import app as loaderd
from preprocess.__main__ import app as blockstore
from tests.clients.test_adapters import CITES, WRITES
from tests.daemons import daemon, spawn, stop
from tests.heterostores import random_hetero, write_hetero_store
from tests.processes import run_main
from tests.test_tutorials import BLOCK, run_command

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if "results" not in page.parts and "tutorials" not in page.parts
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in sorted(PAGES)}
ELSEWHERE = {"32G": "64M", '"cuda"': '"cpu"'}  # what not every machine has
CASES = {"tools.bench": "disk", "tools.compare": "accuracy", "tools.memory": "ingest"}
COMMAND = re.compile(
    r"^(?:\S+\$\s+)?"
    r"(blockstore|loaderd|make|(?:torchrun [^`]*?|(?:\.venv/bin/)?python )-m \w+[.\w]*)"
    r"(?: (.*))?$"
)


def commands() -> Iterator[tuple[str, str, str]]:
    """(page, program, words after it) of all commands in the text and in blocks."""
    for name, text in TEXTS.items():
        lines = [
            line
            for language, block in BLOCK.findall(text)
            if language == ""
            for line in block.replace("\\\n", " ").splitlines()
        ]
        inline = re.findall(r"`([^`]+)`", BLOCK.sub("", text))
        for line in [*lines, *(" ".join(words.split()) for words in inline)]:
            if found := COMMAND.match(line.strip()):
                program = found[1].split(" -m ")[-1]
                yield name, program, (found[2] or "").split(" # ")[0].split("  #")[0]


@cache
def options_of(program: str, command: str) -> set[str]:
    """Of a subcommand, or what the help of a module says."""
    if program in ("blockstore", "loaderd"):
        group: Any = typer.main.get_command({"blockstore": blockstore, "loaderd": loaderd}[program])
        if command.startswith("-") or command in ("", "COMMAND"):
            return {o for p in group.params for o in p.opts} | {"--help"}
        found = group.commands[command]  # KeyError: there is none of that name
        return {o for p in found.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    if program == "make":
        targets = re.findall(r"^([\w ]+):", (ROOT / "Makefile").read_text(), re.M)
        named = re.findall(r"^CHECKS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
        assert command in " ".join([*targets, *named]).split(), command
        return set()
    said, words = io.StringIO(), [program, "--help"]
    if program in CASES:
        words.insert(1, command if re.fullmatch(r"[a-z-]+", command) else CASES[program])
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        run_main(*words)
    return set(re.findall(r"--[a-z][\w-]*", said.getvalue()))


def test_commands_have_the_options_that_the_documents_give_them() -> None:
    checked, wrong = 0, []
    for page, program, words in commands():
        if program in ("pytest", "tests.golden_cases", "tools."):
            for path in re.findall(r"tests/\S+", words):
                assert (ROOT / path).exists(), (page, path)
            continue
        command = next((w for w in words.split() if not w.startswith("http")), "")
        try:
            there = options_of(program, command)
        except KeyError:
            wrong.append(f"{page}: {program} {words}: no command {command}")
            continue
        own, _, _ = words.partition(" -- ")
        asked = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", own))
        wrong += [f"{page}: {program} {words}: no {o}" for o in sorted(asked - there)]
        checked += len(asked)
    assert not wrong, "\n".join(wrong)
    assert checked > 100


@pytest.fixture(scope="module")
def scene(small_graph: Path, tmp_path_factory: pytest.TempPathFactory):
    """A folder as the README has it, with FOLDER and STORE, and daemons."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "FOLDER").symlink_to(small_graph)
    for line in block("README.md", 1, folder)[:1]:  # blockstore ingest ...
        run_command(line, folder)
    run_command("blockstore ingest FOLDER parted --edge-ids --partitions 16 --no-summary", folder)
    nodes = {"author": 60, "paper": 100}
    graph = random_hetero(
        np.random.default_rng(1), nodes, (CITES, WRITES), 9, {"paper": 5}, "paper"
    )
    write_hetero_store(folder / "hetero", graph)
    with daemon(folder / "parted", "64M", 2) as one, daemon(folder / "hetero", "16M", 2) as several:
        yield SimpleNamespace(folder=folder, one=one, several=several)


def block(page: str, number: int, folder: Path) -> list[str]:
    """Its lines, with the places that `folder` has instead."""
    text = BLOCK.findall(TEXTS[page])[number][1].replace("/run/user/1000", str(folder))
    for there, ours in ELSEWHERE.items():
        text = text.replace(there, ours)
    return text.splitlines()


SNIPPETS = [
    (name, number)
    for name, text in TEXTS.items()
    for number, (language, _) in enumerate(BLOCK.findall(text))
    if language == "python"
]


@pytest.mark.parametrize(("page", "number"), SNIPPETS, ids=[f"{p}:{n}" for p, n in SNIPPETS])
def test_a_snippet_runs(page: str, number: int, scene: Any, monkeypatch: Any) -> None:
    from clients.torch import NeighborDataset

    monkeypatch.chdir(scene.folder)
    text = "\n".join(block(page, number, scene.folder))
    names: dict[str, Any] = {
        "__name__": "snippet", "NeighborDataset": NeighborDataset,
        "endpoint": scene.several if "Hetero" in text else scene.one,
        "model": lambda x, edges: x, "loss_of": lambda out, y: (out.sum(), y.sum()),
    }  # fmt: skip
    served = None
    if page == "README.md" or "ipc://" in text:  # as the README serves it
        words = shlex.split(block("README.md", 1, scene.folder)[1])
        assert words[:2] == ["loaderd", "serve"]
        served = spawn(scene.folder / words[2], words[-1], *words[3:5])
    try:
        exec(compile(text, page, "exec"), names)
        made = names.get("data", names.get("loader", names.get("dataset")))
        if made is not None and not hasattr(made, "num_features"):
            next(iter(made))
        if hasattr(made, "close"):
            made.close()
    finally:
        if served is not None:
            assert stop(served) == 0
    assert len(names) > 5


@pytest.mark.parametrize("page", ["docs/plans/packed.md", "docs/plans/propagated.md"])
def test_a_command_of_a_plan_runs(page: str, scene: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(scene.folder)
    for line in block(page, 0, scene.folder):
        if line.startswith("blockstore"):
            run_command(line, scene.folder)
            continue
        words = shlex.split(line)
        assert words[:2] == ["python", "-m"]
        with daemon(scene.folder / "STORE", "64M", 2) as endpoint:
            words = [endpoint if word == "ENDPOINT" else word for word in words[2:]]
            assert run_main(*words, "--epochs", "2") == 0
        assert "accuracy" in capsys.readouterr().out


def test_lookups_say_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    users, items = ["alice", "bob"], [*range(4699, 4712)]
    (tmp_path / "src/users.csv").write_text("user_id\n" + "\n".join(users) + "\n")
    (tmp_path / "src/items.csv").write_text("item_id\n" + "\n".join(map(str, items)) + "\n")
    (tmp_path / "src/likes.csv").write_text("user_id,item_id\nalice,4711\nbob,4700\n")
    run_command("blockstore schema src > src/schema.json", tmp_path)
    run_command("blockstore ingest src STORE --no-summary", tmp_path)
    page = next(text for _, text in BLOCK.findall(TEXTS["docs/layouts.md"]) if "$ block" in text)
    lines, expected = page.splitlines(), []
    for line in lines:
        if line.startswith("$ "):
            expected.append((line.removeprefix("$ "), []))
        else:
            expected[-1][1].append(line)
    for command, said in expected:
        run_command(f"{command.split(' #')[0]} > said", tmp_path)
        assert (tmp_path / "said").read_text().splitlines() == said
