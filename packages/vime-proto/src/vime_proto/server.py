"""What every vime server has: health, reflection, InfoService, limits, TLS, a token, and errors that name the field."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import inspect
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

import vime_proto
from vime_proto import metadata
from vime_proto.channel import join_address, split_address
from vime_proto.common.v1 import common_pb2, common_pb2_grpc
from vime_proto.errors import ContractError, StatusError, to_status

log = logging.getLogger(__name__)

_ALWAYS = (health.SERVICE_NAME, reflection.SERVICE_NAME)
Service = tuple[Callable[[Any, grpc.aio.Server], None], Any, str]


class AddressInUseError(OSError):
    """The address to listen on is taken, or is not ours."""


@contextlib.contextmanager
def metrics_endpoint(host: str, port: int) -> Iterator[None]:
    """Where a stage opens its endpoint of metrics: an ``OSError`` inside comes out with the key ``metrics_port`` and address."""
    try:
        yield
    except OSError as error:
        raise OSError(f"metrics_port: cannot listen on {join_address(host, port)}: {error.strerror}") from None


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Where and how a server listens.

    Attributes:
        address: ``host:port``; port 0 takes a free one.
        max_message_bytes: most bytes of one message, both ways.
        tls_certificate, tls_key: PEM files; both or none.
        tls_client_ca: PEM file; clients must then show a certificate that it signed (mTLS).
        token: clients must send ``authorization: Bearer <token>``; health and reflection stay open.
    """

    address: str = "127.0.0.1:0"
    max_message_bytes: int = 256 << 20
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    token: str | None = None


@dataclasses.dataclass
class ServerInfo:
    """What ``InfoService.GetInfo`` answers; may be changed while the server runs."""

    package: str
    role: str
    package_version: str = "0"
    run_id: str = ""
    capabilities: dict[str, str] = dataclasses.field(default_factory=dict)
    contract: tuple[str, str] = (vime_proto.CONTRACT_MINIMUM, vime_proto.CONTRACT_MAXIMUM)
    incarnation: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


class RunningServer:
    """A server that listens. Its health is NOT_SERVING until ``set_serving(True)``."""

    def __init__(
        self, server: grpc.aio.Server, address: str, info: ServerInfo, checks: health.aio.HealthServicer, names
    ):
        self.address = address
        self.info = info
        self._server = server
        self._checks = checks
        self._names = ("", *names)

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the server and of each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._checks.set(name, status)

    async def stop(self, grace: float = 1.0) -> None:
        """Refuses new calls at once and ends open ones after ``grace`` seconds."""
        await self._checks.enter_graceful_shutdown()
        await self._server.stop(grace)

    async def wait(self) -> None:
        """Waits until the server has stopped."""
        await self._server.wait_for_termination()


class _Info(common_pb2_grpc.InfoServiceServicer):
    def __init__(self, info: ServerInfo, names: Sequence[str]):
        self._info, self._names = info, names

    async def GetInfo(self, request, context):
        info = self._info
        return common_pb2.GetInfoResponse(
            contract=common_pb2.ContractRange(minimum=info.contract[0], maximum=info.contract[1]),
            package=info.package,
            package_version=info.package_version,
            role=info.role,
            run_id=info.run_id,
            capabilities=info.capabilities,
            incarnation=info.incarnation,
            services=self._names,
        )


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> None:
    if isinstance(error, (ContractError, StatusError)):
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
    log.exception("a call failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


class _Errors(grpc.aio.ServerInterceptor):
    """Checks the token, and renders what servicers raise."""

    def __init__(self, token: str | None):
        self._bearer = f"Bearer {token}" if token else None

    async def intercept_service(self, continuation, details):
        handler = await continuation(details)
        if handler is None:
            return None
        open_to_all = details.method.startswith(("/grpc.health.", "/grpc.reflection."))
        if self._bearer is not None and not open_to_all:
            given = dict(details.invocation_metadata or ()).get(metadata.AUTHORIZATION, "")
            if not hmac.compare_digest(str(given).encode(), self._bearer.encode()):
                return _refusal(handler)
        return _wrap(handler)


def _refusal(handler):
    async def refuse(request, context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: missing or wrong bearer token")

    return _rebuild(handler, refuse)


def _wrap(handler):
    if not handler.response_streaming:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def unary(request, context):
            try:
                return await inner(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _abort(context, error)

        return _rebuild(handler, unary) if inspect.iscoroutinefunction(inner) else handler
    inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
    if not inspect.isasyncgenfunction(inner):
        return handler

    async def stream(request, context):
        try:
            async for response in inner(request, context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error)

    return _rebuild(handler, stream)


def _rebuild(handler, function):
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(function, handler.request_deserializer, handler.response_serializer)


def read_file(key: str, path: str) -> bytes:
    """A file that the configuration names.

    Raises:
        OSError: it cannot be read; names the key.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise type(error)(f"{key}: cannot read {path!r}: {error.strerror}") from None


def _credentials(options: ServerOptions) -> grpc.ServerCredentials | None:
    if not (options.tls_certificate or options.tls_key):
        return None
    if not (options.tls_certificate and options.tls_key):
        raise ContractError("tls_key", "tls_certificate and tls_key must be given together")
    pair = (read_file("tls_key", options.tls_key), read_file("tls_certificate", options.tls_certificate))
    client_ca = read_file("tls_client_ca", options.tls_client_ca) if options.tls_client_ca else None
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


async def start_server(
    services: Sequence[Service],
    info: ServerInfo,
    options: ServerOptions = ServerOptions(),
    generic_handlers: Sequence[grpc.GenericRpcHandler] = (),
    generic_names: Sequence[str] = (),
) -> RunningServer:
    """Starts a server and answers once it listens.

    Args:
        services: generated ``add_XServicer_to_server``, the servicer (async methods), the full service name.
        info: what it is.
        options: where and how it listens.
        generic_handlers, generic_names: handlers of undecoded calls (a proxy's), and the services that they offer.

    Raises:
        AddressInUseError: the address is taken.
        ContractError: TLS options that do not fit together, or a service given twice.
        OSError: a PEM file that cannot be read.
    """
    names = [name for _, _, name in services] + list(generic_names) + ["vime.common.v1.InfoService"]
    # gRPC would answer with the last one registered, and say nothing.
    twice = sorted({name for name in names if (*names, *_ALWAYS).count(name) > 1})
    if twice:
        raise ContractError("services", f"registered twice: {', '.join(twice)}")
    server = grpc.aio.server(
        interceptors=[_Errors(options.token)],
        options=[
            ("grpc.max_receive_message_length", options.max_message_bytes),
            ("grpc.max_send_message_length", options.max_message_bytes),
            # Without this a second server may bind the same port and take half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ],
    )
    for add, servicer, _ in services:
        add(servicer, server)
    if generic_handlers:
        server.add_generic_rpc_handlers(tuple(generic_handlers))
    common_pb2_grpc.add_InfoServiceServicer_to_server(_Info(info, names), server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*names, *_ALWAYS), server)
    host, _ = split_address(options.address)
    credentials = _credentials(options)
    try:
        if credentials is None:
            port = server.add_insecure_port(options.address)
        else:
            port = server.add_secure_port(options.address, credentials)
    except RuntimeError as error:
        raise AddressInUseError(f"cannot listen on {options.address}: {error}") from None
    if port == 0:
        raise AddressInUseError(f"cannot listen on {options.address}: the port is in use or the host is not ours")
    await server.start()
    running = RunningServer(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", info, checks, names)
    await running.set_serving(False)
    return running
