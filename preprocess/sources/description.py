"""Files that say what a graph's other files hold."""

from pathlib import Path
from typing import TypeVar

import msgspec

from preprocess.errors import BadInput

_Records = TypeVar("_Records")


def read_description(
    path: Path, kind: type[_Records], expected: str = "a file that describes tables"
) -> _Records:
    """A JSON or YAML file as records of a type.  Raises BadInput."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        found = "no file: it is missing"
        raise BadInput.at(path, found, expected, "is the path right?") from error
    except OSError as error:
        raise BadInput.at(path, error.strerror, expected, "is the path right?") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(raw, type=kind)
        return msgspec.yaml.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split()).replace("`", "'")
        raise BadInput.at(path, said, expected, "correct it") from error
