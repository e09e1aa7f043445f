"""Structured logs on stderr: one JSON object or one readable line per record.

Modules log through `logging.getLogger(__name__)` and pass facts with `extra=fields(...)`, so that
both formats carry the same names. Knows nothing of the services.
"""

import json
import logging
import sys
import time
from typing import Any

MAX_VALUE_CHARS = 1000


def fields(**values: Any) -> dict[str, Any]:
    """`log.info("request finished", extra=fields(request_id=...))`.

    Peers choose some of the values: strings are cut after MAX_VALUE_CHARS.
    """
    return {"fields": {name: _cut(value) for name, value in values.items()}}


def setup(service: str, log_format: str, level: str) -> None:
    """Replaces the root logger's handlers; `log_format` is "console" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(service) if log_format == "json" else _Console(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _Json(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class _Console(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = "".join(f" {k}={_line(v)}" for k, v in getattr(record, "fields", {}).items())
        line = f"{clock} {record.levelname:7} {self._service} {record.getMessage()}{facts}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
        return f"{value[:MAX_VALUE_CHARS]}... ({len(value)} characters)"
    return value


def _line(value: Any) -> str:
    """No line breaks and no terminal codes, which would let a peer forge log lines."""
    text = str(value)
    return text if text.isprintable() else repr(text)[1:-1]


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
