"""What mkdocstrings does to our docstrings: two columns of parameters become a list."""

from typing import Any

import griffe

from tools.site import parameters_as_list


class ParameterLists(griffe.Extension):  # type: ignore[misc]
    """An extension of griffe, which mkdocs.yml names."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of what was just read."""
        if obj.docstring is not None:
            obj.docstring.value = parameters_as_list(obj.docstring.value)
