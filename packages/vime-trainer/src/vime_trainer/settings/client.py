"""The table [client] of the configuration: how this trainer shows itself to buffer, router and engines."""

from __future__ import annotations

from pathlib import Path

import grpc
from pydantic import Field

from vime_proto.channel import open_channel
from vime_proto.settings import Section

__all__ = ["ClientSettings"]


class ClientSettings(Section):
    """TLS and token for the calls that the trainer makes."""

    tls_ca: str | None = Field(None, description="PEM file of the authority that signed the servers' certificates")
    tls_certificate: str | None = Field(None, description="PEM file of this client, where servers ask for one")
    tls_key: str | None = Field(None, description="PEM file")
    token_file: str | None = Field(None, description="file with the bearer token that is sent")

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel to a server.

        Raises:
            OSError: a file that cannot be read.
            ContractError: an address of another form.
        """
        token = Path(self.token_file).read_text().strip() if self.token_file else None
        return open_channel(address, token, self.tls_ca, self.tls_certificate, self.tls_key)
