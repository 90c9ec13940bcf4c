"""The configuration file."""

import pytest

from loaderd.cli.config import BadConfig, read_config

OPTIONS = {"mem", "metrics_port", "dry_run"}


def test_options_by_either_spelling(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('mem = "3G"\nmetrics-port = 9464\ndry_run = true\n')
    assert read_config(path, OPTIONS) == {"mem": "3G", "metrics_port": "9464", "dry_run": "True"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory = 1", "memory is no option; expected one of dry-run, mem, metrics-port"),
        ("mem = 3G", "expected TOML"),
        ("mem = [1]", "expected a string, number or boolean"),
        ("[mem]\nx = 1", "expected a string, number or boolean"),
        ("dry-run = true\ndry_run = true", "stands there twice"),
        ("mem = '\udcff'", "expected TOML"),
    ],
)
def test_what_is_refused(tmp_path, text, says):
    path = tmp_path / "c.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(BadConfig, match=says) as caught:
        read_config(path, OPTIONS)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(BadConfig, match="No such file"):
        read_config(tmp_path / "none.toml", OPTIONS)
