"""Who is at the other end, what the rules of the configuration say of him, and how wrong ones are refused."""

from __future__ import annotations

import grp
import pwd
import socket
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from identities import FREE_ID, TENANT, connected

from hypercache_daemon.access import Access
from hypercache_daemon.config import ConfigError, parse
from hypercache_daemon.peers import Peer, People, peer_of, people
from hypercache_daemon.rights import Rules, rules
from hypercache_daemon.server import bind
from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.messages import Evict, GetStatus, Ingest, Locate, Pin, Ping, Purge, StageWrite

ALICE = Peer(FREE_ID + 10, frozenset({FREE_ID + 20}))
BOB = Peer(FREE_ID + 11, frozenset({FREE_ID + 21, FREE_ID + 22}))


# -- who is there --------------------------------------------------------------------------------------


def test_the_kernel_tells_the_user_and_all_groups_of_the_moment_of_connecting(short_dir: Path) -> None:
    with (
        closing(bind(short_dir / "s", Access())) as listener,
        closing(connected(short_dir / "s")),  # by somebody whom this process is no more
        closing(listener.accept()[0]) as accepted,
    ):
        assert peer_of(accepted) == Peer(TENANT.uid, frozenset({TENANT.gid, *TENANT.groups}))


class NoGroups:
    """A socket of a kernel that does not tell further groups, or of a client that has too many."""

    def getsockopt(self, level: int, option: int, buffer_bytes: int, /) -> bytes:
        if option == socket.SO_PEERCRED:
            return struct.pack("iII", 1, 7, 8)
        raise OSError


def test_groups_that_the_kernel_does_not_tell_are_none() -> None:
    assert peer_of(NoGroups()) == Peer(7, frozenset({8}))


def test_people_are_known_by_name_or_number_and_groups_by_their_mark() -> None:
    user, group = pwd.getpwuid(0), grp.getgrgid(0)
    named = people([user.pw_name, f" @{group.gr_name} ", "41010", "@41020"])
    assert named == People(frozenset({0, 41010}), frozenset({0, 41020}))
    assert ALICE in named
    assert BOB not in named
    assert Peer(BOB.uid, BOB.gids | {41020}) in named
    assert Peer(41020, frozenset({41010})) not in named, "a group's number is no user's"
    assert ALICE not in People()


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("no such user", "there is no user 'no such user'"),
        ("@no such group", "there is no group 'no such group'"),
        ("", "there is no user ''"),
        ("@", "there is no group ''"),
        ("-1", "there is no user '-1'"),
        ("4294967295", "4294967295 is no user or group"),
        ("@4294967295", "4294967295 is no user or group"),
        ("٣", "there is no user '٣'"),
    ],
)
def test_nobody_is_guessed(word: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        people([word])


# -- what the rules say --------------------------------------------------------------------------------


def refused(made: Rules, peer: Peer, request: object) -> bool:
    refusal = made.rights_of(peer).refusal(request)
    assert refusal is None or refusal.code is ErrorCode.FORBIDDEN
    return refusal is not None


@pytest.mark.parametrize("request_", [Purge(), Evict(uri="a://b"), GetStatus(), Ping()], ids=str)
def test_without_rules_everything_is_for_everybody(request_: object) -> None:
    made = rules([], [], [])
    assert made.lets_in(ALICE)
    assert not refused(made, ALICE, request_)
    assert made.rights_of(ALICE).refusals("evict_many", ["a", "b"]) == [None, None]


def test_only_the_listed_are_let_in_and_root_is_not_unless_listed() -> None:
    made = rules(["41010", "@41022"], [], [])
    assert made.lets_in(ALICE)
    assert made.lets_in(BOB)
    assert not made.lets_in(Peer(FREE_ID + 12, frozenset({FREE_ID + 20})))
    assert not made.lets_in(Peer(0, frozenset({0})))


def test_a_restricted_action_is_for_those_listed_and_other_actions_for_all() -> None:
    made = rules([], ["purge=41010,@41099", "get_status="], [])
    assert not refused(made, ALICE, Purge())
    assert refused(made, BOB, Purge())
    assert refused(made, ALICE, GetStatus())
    assert not refused(made, BOB, Evict(uri="a://b"))


OWNED = ("hypercache://a=41010", "hypercache://a/shared/=41010,@41021", "hypercache://a/x=y/=")


@pytest.mark.parametrize(
    ("uri", "alice", "bob"),
    [
        ("hypercache://a", True, False),
        ("hypercache://a/b", True, False),
        ("hypercache://a/b/c", True, False),
        ("hypercache://a/shared", True, True),
        ("hypercache://a/shared/b", True, True),
        ("hypercache://a/shared2/b", True, False),
        ("hypercache://a/x=y/b", False, False),
        ("hypercache://ab", True, True),
        ("hypercache://A/b", True, True),
        ("s3://a/b", True, True),
    ],
)
def test_the_longest_prefix_of_whole_segments_says_whose_a_uri_is(uri: str, alice: bool, bob: bool) -> None:
    made = rules([], [], OWNED)
    for peer, may in ((ALICE, alice), (BOB, bob)):
        assert refused(made, peer, Evict(uri=uri)) is not may
        (refusal,) = made.rights_of(peer).refusals("evict_many", [uri])
        assert (refusal is None) is may


def test_a_scheme_alone_is_a_prefix_of_all_its_uris() -> None:
    made = rules([], [], ["s3://=41010"])
    assert not refused(made, ALICE, Evict(uri="s3://b/c"))
    assert refused(made, BOB, Evict(uri="s3://b/c"))
    assert not refused(made, BOB, Evict(uri="s3a://b/c"))


@pytest.mark.parametrize(
    ("request_", "is_refused"),
    [
        (StageWrite(uri="hypercache://a/b", size_bytes=1), True),
        (Pin(uri="hypercache://a/b"), True),
        (Locate(uri="hypercache://a/b", pinned=True), True),
        (Ingest(uri="hypercache://a/b", pinned=True), True),
        (Locate(uri="hypercache://a/b"), False),
        (Ingest(uri="hypercache://a/b"), False),
        (Ping(), False),
    ],
    ids=lambda value: getattr(value, "action", None),
)
def test_what_changes_an_object_is_for_its_owners_and_what_reads_it_for_all(
    request_: object, is_refused: bool
) -> None:
    made = rules([], [], OWNED)
    assert refused(made, BOB, request_) is is_refused
    assert not refused(made, ALICE, request_)


def test_a_refusal_is_short_however_long_the_names_and_many_the_groups_are() -> None:
    stranger = Peer(FREE_ID, frozenset(range(FREE_ID, FREE_ID + 256)))
    (refusal,) = rules([], [], OWNED).rights_of(stranger).refusals("x", ["hypercache://a/" + "b" * 8000])
    assert refusal is not None
    assert len(refusal.message) < 800
    assert f"{FREE_ID + 15}, …" in refusal.message


def test_where_anything_has_owners_a_purge_is_for_those_alone_who_are_named_for_it() -> None:
    assert refused(rules([], [], OWNED), ALICE, Purge())
    made = rules([], ["purge=41010"], OWNED)
    assert not refused(made, ALICE, Purge())
    assert refused(made, BOB, Purge())


# -- rules that are wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--allow", "no such user"], "--allow: there is no user 'no such user'"),
        (["--restrict", "purge"], "--restrict: 'purge' says not for whom; write ACTION=USER,@GROUP"),
        (["--restrict", "ping=0"], "--restrict: 'ping' cannot be restricted; what can is evict, get_devices"),
        (["--restrict", "purge=0,,1"], "--restrict: there is no user ''"),
        (["--restrict", "purge=0", "--restrict", "purge=1"], "--restrict: purge is given twice"),
        (["--owner", "hypercache://a"], "--owner: 'hypercache://a' says not for whom"),
        (["--owner", "a/b=0"], "--owner: 'a/b' is no prefix of uris"),
        (["--owner", "h://a=0", "--owner", "h://a/=1"], "--owner: h://a/ is given twice"),
        (["--owner", "h://a=@no such group"], "--owner: there is no group 'no such group'"),
    ],
)
def test_a_wrong_rule_is_refused_in_one_sentence(arguments: Sequence[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--pool-dir", "/pool", *arguments]).rules()
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_an_empty_list_of_the_allowed_is_refused_and_not_taken_for_none(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('pool_dir = "/pool"\nallow = []\n')
    with pytest.raises(ConfigError, match="--allow: the list is empty"):
        parse(["--config", str(file)]).rules()


def test_rules_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'pool_dir = "/pool"\nallow = ["41010", "@41022"]\nrestrict = ["purge=41010"]\nowner = ["h://a=41010"]\n'
    )
    made = parse(["--config", str(file)]).rules()
    assert made.lets_in(BOB)
    assert refused(made, BOB, Purge())
    assert refused(made, BOB, Evict(uri="h://a/b"))
