"""Build the documentation site (`make site`); a warning, such as a dead link, is an error.

Pages lie in several folders of the tree (README.md, docs, FORMAT.md, PROTOCOL.md).  They are copied
to one folder with the same layout, so that links work on the site as they do in the tree.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build/site/source"
PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGES.md", "blockstore/FORMAT.md", "loaderd/api/PROTOCOL.md",
    "docs", "examples", "tools/mutants/faults.toml", "tests/scripts/reddit.py",
)  # fmt: skip
PARAMETER = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


def parameters_as_list(text: str) -> str:
    """Convert a docstring with parameters in two columns to Markdown, one list item for each."""
    lines: list[str] = []
    width = 0  # of the first column; 0: no parameter to continue
    for line in text.splitlines():
        found = PARAMETER.match(line)
        if found:
            if not width and lines and lines[-1]:
                lines.append("")
            width = found.start(2)
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {names}: {found[2]}")
        elif width and line.startswith(" " * width):
            lines.append(f"  {line.strip()}")
        else:
            if width and line:
                lines.append("")
            width = 0
            lines.append(line)
    return "\n".join(lines)


def copy_pages() -> None:
    """Copy the pages, and what they show, to one folder."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for name in PAGES:
        place = SOURCE / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place)
        else:
            shutil.copy(ROOT / name, place)
    for notebook in SOURCE.rglob("*.ipynb"):
        notebook.with_suffix(".md").write_text(notebook_as_page(notebook.read_text()))


def notebook_as_page(text: str) -> str:
    """A notebook as Markdown: each code cell is followed by its stored output."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        said = (o.get("text") or o["data"]["text/plain"] for o in cell["outputs"])
        if lines := "".join("".join(piece) for piece in said).strip():
            parts.append(f"```\n{lines}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    copy_pages()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
