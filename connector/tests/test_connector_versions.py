"""What a client says, and does not send, where the daemon or it itself speaks an older wire."""

import pytest
from asking import MakeClient

from hypercache_connector import DaemonUnavailable
from hypercache_connector.outcomes import Outcome
from hypercache_protocol import LocalProtocolError, WireVersion
from hypercache_protocol.batches import LocateMany
from hypercache_protocol.messages import CommitWrite, Locate, MissReply
from hypercache_protocol.versions import LATEST, WIRE_1_0, WIRE_1_1, WIRE_2_0

NEEDS = frozenset({"chunk_checksums", "local_only"})


@pytest.fixture
def make(scripted, client_to: MakeClient) -> MakeClient:
    """Makes clients of the scripted daemon that speak at most `version`."""
    return lambda version=LATEST: client_to(scripted.socket_path, version=version)


@pytest.mark.parametrize(
    ("features", "most", "spoken"),
    [
        (None, WIRE_2_0, WIRE_1_0),
        ((), WIRE_1_1, WIRE_1_0),
        (("a feature of the future",), WIRE_2_0, WIRE_1_0),
        (("local_only",), WIRE_1_1, WIRE_1_1),
        (("local_only",), WIRE_1_0, WIRE_1_0),
    ],
)
def test_the_wire_of_lines_is_the_older_of_both_sides(
    scripted,
    make: MakeClient,
    features: tuple[str, ...] | None,
    most: WireVersion,
    spoken: WireVersion,
) -> None:
    scripted.features = features
    client = make(most)
    assert client.wire is None
    assert client.exchange([Locate(uri="u")]) == [MissReply()]
    assert client.wire == spoken


def test_an_old_daemon_is_told_by_both_versions(scripted, make: MakeClient) -> None:
    scripted.features = None
    with pytest.raises(DaemonUnavailable) as caught:
        make().exchange([Locate(uri="u")], needs=NEEDS)
    assert caught.value.outcome is Outcome.DAEMON_TOO_OLD
    assert str(caught.value) == (
        "the daemon lacks chunk_checksums, local_only; upgrade it to wire 1.1 or newer (it speaks wire 1.0)"
    )


def test_a_client_that_is_held_back_says_that_it_is(scripted, make: MakeClient) -> None:
    with pytest.raises(DaemonUnavailable, match=r"client is held to wire 1\.0 .* need wire 1\.1; .*'wire'"):
        make(WIRE_1_0).exchange([Locate(uri="u")], needs=NEEDS)
    with pytest.raises(DaemonUnavailable, match=r"client is held to wire 1\.1 and batches need wire 2\.0"):
        make(WIRE_1_1).exchange([Locate(uri="u")], needs=frozenset({"batches"}))


@pytest.mark.parametrize("most", [WIRE_1_0, WIRE_1_1, WIRE_2_0], ids=str)
def test_what_an_old_daemon_would_drop_unread_is_never_sent(
    scripted, make: MakeClient, most: WireVersion
) -> None:
    scripted.features = None
    with pytest.raises(LocalProtocolError, match=r"local_only needs wire 1\.1 .* speaks wire 1\.0"):
        make(most).exchange([CommitWrite(uri="u", local_only=True)])
    assert scripted.counted()["commit_write"] == 0


def test_a_batch_is_never_sent_on_lines(scripted, make: MakeClient) -> None:
    with pytest.raises(LocalProtocolError, match=r"locate_many needs wire 2\.0 .* lines of wire 1\.1"):
        make().exchange([LocateMany(prefix="", suffixes=("u",))])
    assert scripted.counted()["locate_many"] == 0


def test_the_status_shows_the_wire(scripted, connect) -> None:
    driver = connect(scripted.socket_path, wire="1.1")
    assert driver.connector.status()["daemon"]["wire"] is None
    driver.exists(["k"])
    assert driver.connector.status()["daemon"]["wire"] == "1.1"
