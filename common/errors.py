"""The exceptions that cross a module border, each with the gRPC status it ends as.

Imports nothing, so pure modules may raise them; `common/interceptors.py` alone turns them into gRPC
status. Messages name the thing, its value, what is allowed and the next step.
"""


class DsparkError(Exception):
    """Base. `status` is a `grpc.StatusCode` name; `retry_after_ms` becomes google.rpc.RetryInfo."""

    status = "INTERNAL"
    retry_after_ms: int | None = None

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        if retry_after_ms is not None:
            self.retry_after_ms = retry_after_ms


class InvalidRequest(DsparkError):
    """The client asked for something that can never work as asked."""

    status = "INVALID_ARGUMENT"


class AlreadyExists(DsparkError):
    """A live request has the same id."""

    status = "ALREADY_EXISTS"


class Overloaded(DsparkError):
    """A bounded queue or pool is full; the same call may succeed after `retry_after_ms`."""

    status = "RESOURCE_EXHAUSTED"
    retry_after_ms = 1000


class SlowConsumer(DsparkError):
    """The client stopped reading its stream and its bounded buffer filled up."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(DsparkError):
    """Draining, not ready, or the engine died; another replica may serve the call."""

    status = "UNAVAILABLE"
    retry_after_ms = 1000


class DeadlineExceeded(DsparkError):
    """The caller's deadline passed before the work was done."""

    status = "DEADLINE_EXCEEDED"


class ContractMismatch(DsparkError):
    """Drafter and verifier were not made for each other."""

    status = "FAILED_PRECONDITION"


class StartupError(DsparkError):
    """Settings, files or the device make it impossible to start; the process exits with code 2."""

    status = "FAILED_PRECONDITION"


class LoadError(StartupError):
    """A checkpoint file is missing, broken, or does not fit its config."""


class ConfigError(StartupError):
    """A checkpoint config or the settings beside it cannot work (`common.detect`).

    `code` is the rule (E01, E10, ...); `hints` lists what would work.
    """

    def __init__(self, code: str, message: str, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.hints = hints


class RankLost(DsparkError):
    """One of the ranks that compute a model together died or hangs; all end, with exit code 1."""

    status = "UNAVAILABLE"
