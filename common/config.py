"""Turns a frozen dataclass into command-line flags and DSPARK_* variables, and back.

A flag beats its environment variable, which beats the default. Every setting is declared once with
`setting(default, help, ...)`; whatever is unknown, malformed or contradictory is a `StartupError`.
The only module that touches `os.environ`. Knows nothing of what the settings mean.
"""

import argparse
import dataclasses
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common.errors import RankLost, StartupError

ENV_PREFIX = "DSPARK_"
EXIT_BAD_SETTINGS = 2
# What torchrun sets for every process; the last two are where the processes meet.
_TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

T = TypeVar("T")


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field: its default, what it means (with unit), and the values it may take.

    `choices` is for strings; `low` and `high` are inclusive and for numbers.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "low": low, "high": high}
    )


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """What every service process needs, whatever it computes."""

    listen: str = setting("127.0.0.1:50051", "address to serve: HOST:PORT or unix:PATH")
    drain_seconds: float = setting(
        30.0, "seconds that running streams may take after SIGTERM before they are cut", low=0
    )
    threads: int = setting(1, "CPU threads of one forward pass", low=1, high=1024)
    cores: str | None = setting(
        None, "CPU cores that this process keeps to, such as 0 or 2-5,8; absent: any"
    )
    huge_pages: bool = setting(
        True, "move what was loaded to huge pages at start, where Linux has them; up to 10 s"
    )
    otel: str = setting(
        "off",
        "OpenTelemetry traces and metrics; otlp reads the standard OTEL_EXPORTER_OTLP_* variables",
        choices=("off", "console", "otlp"),
    )
    metrics_port: int | None = setting(
        None, "TCP port of the Prometheus endpoint; absent: no endpoint", low=0, high=65535
    )
    metrics_host: str = setting("127.0.0.1", "interface of the Prometheus endpoint")
    log_format: str = setting("console", "how log lines look", choices=("console", "json"))
    log_level: str = setting(
        "info",
        "least severe log line that is written",
        choices=("debug", "info", "warning", "error"),
    )


def parse(
    config_type: type[T],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Reads one `config_type` from flags and environment; nested dataclasses are flattened.

    Raises StartupError for anything unknown or out of range, and for what the dataclass's own
    `__post_init__` finds contradictory. `--help` prints and exits with 0, as usual.
    """
    environ = os.environ if environ is None else environ
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    fields = _flatten(config_type)
    for field in fields:
        _add_flag(parser, field)
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    for field in fields:
        env = env_name(field.name)
        if given[field.name] is not None:
            values[field.name] = _value(field, given[field.name], flag_name(field.name))
        elif env in environ:
            values[field.name] = _value(field, environ[env], env)
    return _build(config_type, values)


def unread_variables(
    config_type: type, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """DSPARK_* variables that no setting of `config_type` reads: misspelt, or another program's.

    They cannot be refused, since Kubernetes injects DSPARK_*_SERVICE_HOST and the like; log them.
    """
    environ = os.environ if environ is None else environ
    known = {env_name(field.name) for field in _flatten(config_type)}
    return tuple(sorted(n for n in environ if n.startswith(ENV_PREFIX) and n not in known))


def limit_threads(num_threads: int) -> None:
    """Sets the thread count of OpenMP and BLAS; only works before torch is imported."""
    assert "torch" not in sys.modules, "limit_threads() must run before the first import of torch"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclasses.dataclass(frozen=True)
class World:
    """The place of this process among those that torchrun started; the default: it is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine

    def named(self, service: str) -> str:
        """What this process is called in logs: the service, and which of several ranks."""
        return service if self.size == 1 else f"{service}[{self.rank}]"


def torchrun_world(environ: Mapping[str, str] | None = None) -> World:
    """Reads torchrun's environment. Raises StartupError if there is only a part of it."""
    environ = os.environ if environ is None else environ
    size = environ.get("WORLD_SIZE", "1")
    if size == "1":
        return World()
    missing = [name for name in _TORCHRUN if name not in environ]
    if missing:
        raise StartupError(
            f"WORLD_SIZE is {size} but {', '.join(missing)} is not set; start all ranks with "
            "torchrun --nproc-per-node N -m ..., or unset WORLD_SIZE to run alone"
        )
    try:
        return World(int(environ["RANK"]), int(size), int(environ["LOCAL_RANK"]))
    except ValueError as error:
        raise StartupError(
            f"WORLD_SIZE, RANK, LOCAL_RANK must be whole numbers ({error}); let torchrun set them"
        ) from error


def cache_dir() -> Path:
    """Where converted models are kept: the user's cache folder, as XDG has it. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspark-split"


def run(prog: str, start: Callable[[], None]) -> int:
    """Runs an entry point, returns its exit code; a StartupError is one line on stderr and 2."""
    try:
        start()
    except (StartupError, RankLost) as error:
        line = " ".join(error.message.split())
        sys.stderr.write(f"{prog}: {line}\n")
        return EXIT_BAD_SETTINGS if isinstance(error, StartupError) else 1
    except KeyboardInterrupt:
        return 130  # the shell's code for death by SIGINT
    return 0


def flag_name(name: str) -> str:
    """`max_running` -> `--max-running`."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """`max_running` -> `DSPARK_MAX_RUNNING`."""
    return ENV_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    """argparse, but errors are StartupErrors of one line instead of a usage dump and exit."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message}; see {self.prog} --help")


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    kind: type  # str, int, float, bool or Path
    optional: bool
    default: Any
    metadata: Mapping[str, Any]


def _flatten(config_type: type) -> list[_Field]:
    hints = typing.get_type_hints(config_type)
    flat: list[_Field] = []
    for field in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(hints[field.name]):
            flat += _flatten(hints[field.name])
        elif field.init:
            kind, optional = _kind(hints[field.name])
            flat.append(_Field(field.name, kind, optional, field.default, field.metadata))
    names = [field.name for field in flat]
    assert len(set(names)) == len(names), (
        f"{config_type.__name__} declares a setting twice: {names}"
    )
    return flat


def _kind(hint: Any) -> tuple[type, bool]:
    optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
    kind = next(a for a in typing.get_args(hint) if a is not type(None)) if optional else hint
    assert kind in (str, int, float, bool, Path), f"a setting cannot be a {hint}"
    return kind, optional


def _add_flag(parser: argparse.ArgumentParser, field: _Field) -> None:
    default = field.default
    if default is dataclasses.MISSING:
        note = "required"
    else:
        note = "default: none" if default is None else f"default: {default}"
    help_text = f"{field.metadata['help']} ({note}; {env_name(field.name)})".replace("%", "%%")
    if field.kind is bool:
        parser.add_argument(
            flag_name(field.name),
            action=argparse.BooleanOptionalAction,
            default=None,
            help=help_text,
        )
        return
    choices = field.metadata["choices"]
    metavar = "{" + ",".join(choices) + "}" if choices else field.kind.__name__.upper()
    parser.add_argument(flag_name(field.name), default=None, metavar=metavar, help=help_text)


def _value(field: _Field, raw: str | bool, source: str) -> Any:
    """One value, converted and range-checked; `source` is the flag or variable it came from."""
    if isinstance(raw, bool):
        return raw
    if field.optional and raw == "":
        return None  # an empty variable switches an optional setting off
    if field.kind is bool:
        word = raw.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        raise StartupError(f"{source}={raw!r} is not a yes/no value; use 1 or 0")
    if field.kind in (int, float):
        return _number(field, raw, source)
    choices = field.metadata["choices"]
    if choices and raw not in choices:
        raise StartupError(f"{source}={raw!r} is not one of {', '.join(choices)}")
    return field.kind(raw)


def _number(field: _Field, raw: str, source: str) -> int | float:
    low, high = field.metadata["low"], field.metadata["high"]
    what = "whole number" if field.kind is int else "number"
    try:
        value: int | float = field.kind(raw)
    except ValueError:
        raise StartupError(f"{source}={raw!r} is not a {what}") from None
    if not math.isfinite(value):
        raise StartupError(f"{source}={raw!r} is not a finite number")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise StartupError(f"{source}={raw} must be {bounds}")
    return value


def _build(config_type: type[T], values: Mapping[str, Any]) -> T:
    hints = typing.get_type_hints(config_type)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
        elif field.init and field.default is dataclasses.MISSING:
            name = field.name
            raise StartupError(f"{flag_name(name)} (or {env_name(name)}) is required")
    return config_type(**arguments)
