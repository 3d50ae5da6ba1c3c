"""Every error that Baton raises for what a user or the world did wrong.

::

    BatonError
    ├── InvalidRequest        bad input: names the field and the limit     INVALID_ARGUMENT   400
    ├── ModelNotFound         a model that is not served                   NOT_FOUND          404
    ├── Unsupported           known, and refused by name                   UNIMPLEMENTED      400
    ├── Unauthenticated       no or a wrong credential                     UNAUTHENTICATED    401
    ├── PermissionDenied      a credential without this right              PERMISSION_DENIED  403
    ├── Overloaded            queues are full: when to try again           RESOURCE_EXHAUSTED 429
    ├── Unavailable           no worker, draining, out of attempts         UNAVAILABLE        503
    ├── DeadlineExceeded      the request's time is over                   DEADLINE_EXCEEDED  504
    ├── RequestCancelled      the client left                              CANCELLED          499
    ├── InternalError         our bug, or a request that kills workers     INTERNAL           500
    ├── ConfigError           a setting, flag or file that cannot be used  (at start, exit 2)
    │   └── ModelError        a model folder or file that cannot be served
    └── TransferError         a hand-off that did not happen               (becomes kv_lost)
        ├── LeaseRefused      the exporter's verdict was not OK
        ├── ChecksumMismatch  a copied block is not what was offered
        ├── LayoutMismatch    the two pools differ in a named field
        ├── PeerLost          the other end is gone
        └── TransferCancelled our own side no longer wants the copy

The message of an error that can reach a client holds nothing internal: no path, address or pid.
An ``assert`` is for our own bugs and is not in this tree.
"""

from typing import ClassVar


class BatonError(Exception):
    """Base of all errors. ``grpc_code`` is the name of a gRPC status code."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(BatonError):
    """A field of the request is out of its limits; the text says which and what to do."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelNotFound(BatonError):
    grpc_code = "NOT_FOUND"
    http_status = 404


class Unsupported(BatonError):
    """Something we know and do not do; ``field`` names it."""

    grpc_code = "UNIMPLEMENTED"
    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unauthenticated(BatonError):
    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(BatonError):
    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class Overloaded(BatonError):
    """Refused because a queue is full; try again after ``retry_after_s``."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(BatonError):
    """Nobody can do it now. ``pool`` names the pool that lacks a worker, or is empty."""

    grpc_code = "UNAVAILABLE"
    http_status = 503

    def __init__(self, message: str, pool: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.pool = pool
        self.retry_after_s = retry_after_s


class DeadlineExceeded(BatonError):
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class RequestCancelled(BatonError):
    grpc_code = "CANCELLED"
    http_status = 499


class InternalError(BatonError):
    """Details go to the log under the request's id, never to the client."""


class ConfigError(BatonError):
    """A setting that cannot be used: the text names it and what would do."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting


class ModelError(ConfigError):
    """A model folder or file that cannot be served."""


class TransferError(BatonError):
    """A hand-off that did not happen. Never reaches a client: the gateway recomputes."""


class LeaseRefused(TransferError):
    def __init__(self, verdict: str) -> None:
        super().__init__(f"lease refused: {verdict}")
        self.verdict = verdict


class ChecksumMismatch(TransferError):
    def __init__(self, index: int) -> None:
        super().__init__(f"block {index} of the offer arrived corrupt")
        self.index = index


class LayoutMismatch(TransferError):
    """The two ends differ in ``field``."""

    def __init__(self, field: str, expected: str, actual: str) -> None:
        super().__init__(f"{field} is {actual}, expected {expected}")
        self.field = field
        self.expected = expected
        self.actual = actual


class PeerLost(TransferError):
    pass


class TransferCancelled(TransferError):
    pass
