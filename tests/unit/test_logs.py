"""Log lines stay single, short lines, whatever peers call themselves."""

import json
import logging
from collections.abc import Iterator

import pytest

from common.logs import MAX_VALUE_CHARS, fields, setup


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_a_peer_cannot_forge_lines_or_colours(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup("drafter", "console", "info")
    name = "a\n12:00:00 ERROR drafter all is lost\x1b[31m"
    root.info("verifier joined", extra=fields(verifier=name, link=3))
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "\x1b" not in line
    assert line.endswith("verifier=a\\n12:00:00 ERROR drafter all is lost\\x1b[31m link=3\n")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_an_endless_value_is_cut(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    setup("verifier", log_format, "info")
    root.info("drafter joined", extra=fields(drafter="x" * 100_000, num=7))
    line = capsys.readouterr().err
    assert len(line) < MAX_VALUE_CHARS + 300 and "100000 characters" in line
    if log_format == "json":
        assert json.loads(line)["num"] == 7
