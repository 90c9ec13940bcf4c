"""A griffe extension for mkdocstrings: two-column parameters in docstrings become lists."""

from typing import Any

import griffe

from tools.site import parameters_as_list


class ParameterLists(griffe.Extension):  # type: ignore[misc]
    """The extension that mkdocs.yml names."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Convert the docstring of an object that was just loaded."""
        if obj.docstring is not None:
            obj.docstring.value = parameters_as_list(obj.docstring.value)
