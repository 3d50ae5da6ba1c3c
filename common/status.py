"""Our errors as gRPC statuses with google.rpc details, and back: the one table between them."""

from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

from common import errors
from common.errors import BatonError, InternalError

ERROR_DOMAIN = "baton"


async def abort_with(context: aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call with ``error``'s status: BadRequest for a field, RetryInfo where trying again
    helps, ErrorInfo always. Errors that are not for clients become a bare INTERNAL."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returned")


def is_for_clients(error: BatonError) -> bool:
    """Whether its text may leave the process; statuses of other errors say INTERNAL alone."""
    return error.grpc_code != InternalError.grpc_code or isinstance(error, InternalError)


def to_status(error: BatonError) -> status_pb2.Status:
    if not is_for_clients(error):
        error = InternalError("internal error")
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=ERROR_DOMAIN)
    details: list[Message] = [info]
    if isinstance(error, errors.InvalidRequest | errors.Unsupported):
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=error.field, description=error.message
                    )
                ]
            )
        )
    if isinstance(error, errors.Unavailable) and error.pool:
        info.metadata["pool"] = error.pool
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.grpc_code), message=error.message, details=packed
    )


_BY_CODE: Final[dict[str, type[BatonError]]] = {
    kind.grpc_code: kind
    for kind in (
        errors.ModelNotFound,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.Overloaded,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.RequestCancelled,
        errors.InternalError,
    )
}


def is_lost_connection(error: grpc.RpcError) -> bool:
    """Whether a call ended because its connection broke, rather than by what a gateway said."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and rpc_status.from_call(error) is None


def to_baton_error(error: grpc.RpcError) -> BatonError:
    """What a failed call raised, synchronous or not, as one of our errors: the inverse of
    `abort_with`, and a sensible guess for statuses that gRPC itself made."""
    code = error.code().name
    message = error.details() or code
    field, pool, retry_after_s = "request", "", 1.0
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        bad_request = error_details_pb2.BadRequest()
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(info):
            pool = info.metadata.get("pool", "")
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    if code == "INVALID_ARGUMENT":
        return errors.InvalidRequest(field, message.removeprefix(f"{field}: "))
    if code == "UNIMPLEMENTED":
        return errors.Unsupported(field, message.removeprefix(f"{field}: "))
    if code == "UNAVAILABLE":
        return errors.Unavailable(message, pool, retry_after_s)
    if code == "RESOURCE_EXHAUSTED":
        return errors.Overloaded(message, retry_after_s)
    return _BY_CODE.get(code, InternalError)(message)
