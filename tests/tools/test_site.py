"""What is done to pages and docstrings before mkdocs has them; `make site` builds with it."""

import json
import re
from pathlib import Path

from tools.site import PAGES, ROOT, notebook_as_page, parameters_as_list

DOCSTRING = """Draw neighbors.

seed        of the draws
rank, size  of this process; and of how many
            there are

Raises Refused.
    code stays  as it is
"""
MARKDOWN = """Draw neighbors.

- `seed`: of the draws
- `rank`, `size`: of this process; and of how many
  there are

Raises Refused.
    code stays  as it is"""


def test_columns_of_parameters_become_a_list():
    assert parameters_as_list(DOCSTRING) == MARKDOWN
    assert parameters_as_list("a  1\nText.") == "- `a`: 1\n\nText."
    assert parameters_as_list("Text.\na  1") == "Text.\n\n- `a`: 1"


def test_the_site_has_every_page_and_each_once():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"\S+\.md", nav)
    assert len(set(listed)) == len(listed)
    named = {name for name in PAGES if name.endswith(".md")}
    pages = {str(page.relative_to(ROOT)) for page in Path(ROOT / "docs").rglob("*.md")}
    made = {str(n.relative_to(ROOT).with_suffix(".md")) for n in (ROOT / "docs").rglob("*.ipynb")}
    assert made
    assert set(listed) == pages | named | made


def test_a_notebook_becomes_a_page():
    cells = [
        {"cell_type": "markdown", "source": ["# Head\n", "Text."]},
        {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": [
            {"output_type": "stream", "text": ["said\n"]},
            {"output_type": "execute_result", "data": {"text/plain": ["1"]}},
        ]},
        {"cell_type": "code", "source": "y = 2", "outputs": []},
    ]  # fmt: skip
    assert notebook_as_page(json.dumps({"cells": cells})) == (
        "# Head\nText.\n\n```python\nx = 1\nx\n```\n\n```\nsaid\n1\n```\n\n```python\ny = 2\n```\n"
    )
