"""The file of `serve --config`: TOML, one key an option."""

import tomllib
from collections.abc import Collection
from pathlib import Path

from loaderd.api.errors import DaemonError


class BadConfig(DaemonError, ValueError):
    """A configuration file cannot be read, or has a wrong option."""


def read_config(
    path: Path, options: Collection[str], lists: Collection[str] = ()
) -> dict[str, str | list[str]]:
    """Options by name, `metrics-port` as `metrics_port`, with values as on the command line.

    lists   options that are lists of strings; one alone may stand for itself

    Raises BadConfig: unreadable, not TOML, an unknown option, a table or a list.
    """
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}; give a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f'{path}: {error}; expected TOML, such as mem = "32G"') from error
    values: dict[str, str | list[str]] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in options:
            known = ", ".join(sorted(o.replace("_", "-") for o in options))
            raise BadConfig(f"{path}: {key} is no option; expected one of {known}")
        if name in values:
            raise BadConfig(f"{path}: {key} stands there twice, with _ and with -; keep one")
        if name in lists:
            several = value if isinstance(value, list) else [value]
            if not several or not all(isinstance(one, str) for one in several):
                raise BadConfig(f"{path}: {key} is {value!r}, expected a string, or some in a list")
            values[name] = several
            continue
        if not isinstance(value, str | int | float):
            raise BadConfig(f"{path}: {key} is {value!r}, expected a string, number or boolean")
        values[name] = str(value)
    return values
