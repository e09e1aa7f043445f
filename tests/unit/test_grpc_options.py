"""Channel and server options: gRPC ignores names it does not know, so each must be known."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from common import server as common_server
from verifier_svc import draft_link

OPTIONS = {name for name, _ in (*common_server._OPTIONS, *draft_link._OPTIONS)}
CORE = Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_grpc_knows_the_option(name: str) -> None:
    assert name.encode() in CORE


def test_the_verifier_pings_less_often_than_the_drafter_allows() -> None:
    client, server = dict(draft_link._OPTIONS), dict(common_server._OPTIONS)
    allowed = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] > allowed
