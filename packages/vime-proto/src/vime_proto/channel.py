"""Client side of every call: channels that bypass proxies, readiness, and retries of what may be retried."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Collection
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vime_proto import metadata
from vime_proto.errors import ContractError, from_rpc_error

_DEFAULT_MESSAGE_BYTES = 256 << 20
_FIRST_BACKOFF = 0.05
_LARGEST_BACKOFF = 2.0

LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""Codes of a call whose server cannot be reached, or ended meanwhile, which may end the calls under way with CANCELLED.

A call of asyncio that this side cancels has no code; it raises ``asyncio.CancelledError``.
"""


def split_address(address: str) -> tuple[str, int]:
    """``("::1", 50051)`` for ``"[::1]:50051"``.

    Raises:
        ContractError: not of the form host:port, with IPv6 hosts in brackets.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isdigit() and int(port) < 65536):
        raise ContractError("address", f"{address!r} is not host:port (IPv6 hosts in brackets, port 0 to 65535)")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """``host:port``, with IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Stages talk to one another directly; a proxy variable of the environment must not come between.
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", 20000),
        ("grpc.keepalive_timeout_ms", 20000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # This also bounds a connection attempt, which takes long on a busy host.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def _open(library, address: str, tls: tuple[str | None, str | None, str | None], max_message_bytes: int, **more):
    """A channel of ``grpc`` or ``grpc.aio``; ``tls`` holds the paths of authority, certificate and key."""
    split_address(address)
    options = _options(max_message_bytes)
    authority, certificate, key = tls
    if not (authority or certificate):
        return library.insecure_channel(address, options, **more)
    pem = [Path(path).read_bytes() if path else None for path in (authority, key, certificate)]
    return library.secure_channel(address, grpc.ssl_channel_credentials(*pem), options, **more)


class _Token:
    """Adds the bearer token. An asyncio channel files each interceptor under one kind of call only, hence four classes."""

    def __init__(self, token: str):
        self._bearer = (metadata.AUTHORIZATION, f"Bearer {token}")

    async def _pass(self, continuation, details, request):
        given = tuple(details.metadata or ())
        marked = grpc.aio.ClientCallDetails(
            details.method,
            details.timeout,
            grpc.aio.Metadata(*given, self._bearer),
            details.credentials,
            details.wait_for_ready,
        )
        return await continuation(marked, request)


class _UnaryUnaryToken(_Token, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _Token._pass


class _UnaryStreamToken(_Token, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _Token._pass


class _StreamUnaryToken(_Token, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = _Token._pass


class _StreamStreamToken(_Token, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = _Token._pass


_TOKENS = (_UnaryUnaryToken, _UnaryStreamToken, _StreamUnaryToken, _StreamStreamToken)


class _SyncToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, token: str):
        self._bearer = (metadata.AUTHORIZATION, f"Bearer {token}")

    def _intercept(self, continuation, details, request):
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._bearer]), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _intercept


def open_channel(
    address: str,
    token: str | None = None,
    tls_ca: str | None = None,
    tls_certificate: str | None = None,
    tls_key: str | None = None,
    max_message_bytes: int = _DEFAULT_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel for asyncio. It connects at the first call, and again by itself after a loss.

    Args:
        address: ``host:port``.
        token: bearer token, where the server asks for one.
        tls_ca, tls_certificate, tls_key: PEM files; any of them turns TLS on.
        max_message_bytes: most bytes of one message, both ways.

    Raises:
        ContractError: an address of another form.
    """
    interceptors = [kind(token) for kind in _TOKENS] if token else None
    return _open(grpc.aio, address, (tls_ca, tls_certificate, tls_key), max_message_bytes, interceptors=interceptors)


def open_sync_channel(
    address: str,
    token: str | None = None,
    tls_ca: str | None = None,
    tls_certificate: str | None = None,
    tls_key: str | None = None,
    max_message_bytes: int = _DEFAULT_MESSAGE_BYTES,
) -> grpc.Channel:
    """As ``open_channel``, for threads."""
    channel = _open(grpc, address, (tls_ca, tls_certificate, tls_key), max_message_bytes)
    return grpc.intercept_channel(channel, _SyncToken(token)) if token else channel


async def wait_serving(channel: grpc.aio.Channel, timeout: float, service: str = "") -> None:
    """Waits until the server's health is SERVING.

    Raises:
        TimeoutError: it is not within ``timeout`` seconds; the text holds the last answer.
    """
    deadline = time.monotonic() + timeout
    check = health_pb2_grpc.HealthStub(channel).Check
    last = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=min(left, 5.0))
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            last = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        except grpc.RpcError as error:
            # The last attempt is often cut short by our own deadline, which says less than an answer before it.
            if last == "no answer" or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                last = error.code().name
        await asyncio.sleep(min(0.05, max(left, 0.0)))
    raise TimeoutError(f"not serving within {timeout:g} s; last answer: {last}")


def retry_delay(
    error: grpc.RpcError, attempt: int, also: Collection[grpc.StatusCode] = frozenset()
) -> float | None:
    """Seconds before the next attempt of a call that may be repeated; None when its error is final.

    Passing errors are those of ``LOST``, DEADLINE_EXCEEDED, and RESOURCE_EXHAUSTED with RetryInfo.

    Args:
        error: what the call ended with.
        attempt: calls before this one.
        also: further codes that may pass.
    """
    status = from_rpc_error(error)
    if status.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        passes = status.retry_after is not None
    else:
        passes = status.code in LOST or status.code is grpc.StatusCode.DEADLINE_EXCEEDED
    if not passes and status.code not in also:
        return None
    # Bounded before it is raised to a power: a server may be away for hours.
    backoff = min(_LARGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0)
    return max(backoff, status.retry_after or 0.0)


async def call(method, request, timeout: float = 30.0, deadline: float | None = None, metadata=None):
    """A unary call, repeated while its error may pass (see ``retry_delay``), also at the server that comes after one that ended.

    ABORTED is not repeated: the state that the request relied on is gone, and only the caller knows what follows. Nor is
    anything in a task that is cancelled: it ends at once.

    Args:
        method: a stub's method.
        request: the same for every attempt, hence the same request id.
        timeout: seconds of one attempt.
        deadline: seconds for all attempts together; None stands for ``timeout``.
        metadata: call metadata, as (key, value) pairs.

    Raises:
        grpc.aio.AioRpcError: the last error.
    """
    end = time.monotonic() + (timeout if deadline is None else deadline)
    attempt = 0
    while True:
        try:
            return await method(request, timeout=max(0.001, min(timeout, end - time.monotonic())), metadata=metadata)
        except grpc.RpcError as error:
            delay = retry_delay(error, attempt)
            if delay is None or time.monotonic() + delay >= end:
                raise
            await asyncio.sleep(delay)
            attempt += 1


def sync_call(
    method, request, timeout: float = 30.0, deadline: float | None = None, stop: threading.Event | None = None
):
    """As ``call``, for threads; ``stop`` ends the waiting between attempts."""
    end = time.monotonic() + (timeout if deadline is None else deadline)
    wait = (stop or threading.Event()).wait
    attempt = 0
    last: grpc.RpcError | None = None
    while True:
        try:
            return method(request, timeout=max(0.001, min(timeout, end - time.monotonic())))
        except grpc.RpcError as error:
            delay = retry_delay(error, attempt)
            if delay is None or time.monotonic() + delay >= end or wait(delay):
                raise
            attempt, last = attempt + 1, error
        except ValueError:
            # Calls on a channel that another thread closes end with CANCELLED too; those after them are refused like this.
            if last is None:
                raise
            raise last from None
