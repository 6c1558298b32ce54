"""The table [client]: tokens and TLS for what the trainer calls."""

import grpc
import pytest

from vime_proto.errors import describe
from vime_proto.fakes import FakeBuffer, serve
from vime_proto.server import ServerOptions
from vime_trainer.rl import RlSettings
from vime_trainer.rl._client import ClientSettings
from vime_trainer.rl._peers import check_peer


async def test_the_token_of_a_file_is_sent(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    client = ClientSettings(token_file=str(tmp_path / "token"))
    async with serve(FakeBuffer(), ServerOptions(token="secret")) as server:
        await check_peer("buffer", server.address, "run", 0, client.open)
        with pytest.raises(grpc.RpcError) as error:
            await check_peer("buffer", server.address, "run", 0)
        assert describe(error.value).startswith("UNAUTHENTICATED")


def test_a_missing_file_is_named(tmp_path):
    settings = RlSettings(
        model="m", output="o", buffer="h:1", router="h:2", client={"token_file": str(tmp_path / "nowhere")}
    )
    with pytest.raises(FileNotFoundError, match="nowhere"):
        settings.client.open("h:1")
