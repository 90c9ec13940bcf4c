"""What is done to pages and docstrings before mkdocs has them; `make site` builds with it."""

import re
from pathlib import Path

from tools.site import PAGES, ROOT, parameters_as_list

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
    assert set(listed) == pages | named
