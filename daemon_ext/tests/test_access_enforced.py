"""The rules of access on a running daemon: who is turned away, and what is refused and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_harness import Client, line, running
from frames import bits, framed
from identities import FREE_ID, TENANT, client_as

from hypercache_compat.daemon_process import run_refused
from hypercache_daemon import server

MINE = str(TENANT.uid)
OTHERS = str(FREE_ID)
URI = "hypercache://team/a"


async def turned_away(client: Client) -> str:
    """The sentence that a client is told which is not let in; it writes first, as clients do."""
    await client.send(line("ping"))
    reply = await client.receive()
    assert (reply["status"], reply["error_code"]) == ("ERROR", "FORBIDDEN")
    assert await client.receive_line() == b"", "one line and the end"
    sentence: str = reply["error_message"]
    return sentence


async def test_who_is_not_on_the_list_is_told_what_to_change_and_is_counted(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(short_dir, allow=(OTHERS, f"@{OTHERS}")) as daemon:
        for _ in range(2):
            sentence = await turned_away(client_as(daemon))
            assert sentence.startswith(f"user {TENANT.uid} with groups ")
            assert "--allow" in sentence
        assert (daemon.parts.server.forbidden, daemon.parts.server.accepted) == (2, 0)
        assert daemon.parts.handlers.report()["connections"]["forbidden"] == 2
    assert caplog.text.count("was not let in") == 1, "the log is not for strangers to fill"


@pytest.mark.parametrize(
    "who", [MINE, f"@{TENANT.gid}", *(f"@{group}" for group in TENANT.groups)], ids=lambda who: who[:1]
)
async def test_a_user_and_each_of_its_groups_lets_in(short_dir: Path, who: str) -> None:
    async with running(short_dir, allow=(OTHERS, who)) as daemon:
        assert (await client_as(daemon).ask("ping"))["status"] == "PONG"


async def test_strangers_who_stay_cost_a_bounded_number_of_descriptors(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_TURN_AWAY_S", 3600.0)
    async with running(short_dir, allow=(OTHERS,)) as daemon:
        stubborn = [client_as(daemon) for _ in range(100)]
        told = [await client.receive_line() != b"" for client in stubborn]
        assert sum(told) == 64
        assert [await client.receive_line() for client in stubborn] == [b""] * 100
        assert daemon.parts.server.forbidden == 100


async def test_what_is_restricted_is_refused_and_changes_nothing(short_dir: Path) -> None:
    restrict = tuple(f"{action}={OTHERS}" for action in ("purge", "evict", "get_devices"))
    async with running(short_dir, restrict=restrict) as daemon:
        client, batches = client_as(daemon), await framed(daemon)
        await client.store(URI, b"bytes")
        for action, fields in (("purge", {}), ("evict", {"uri": URI}), ("get_devices", {})):
            code, sentence = await client.refusal(action, **fields)
            assert code == "FORBIDDEN"
            assert f"--restrict {action}=" in sentence
        refusal = await batches.ask("evict_many", suffixes=[URI])
        assert (refusal["status"], refusal["error_code"]) == ("ERROR", "FORBIDDEN")
        assert "--restrict evict=" in refusal["error_message"]
        assert await client.fetch(URI) == b"bytes"
        assert (await client.status())["requests"]["purge.ERROR"] == 1


async def test_those_for_whom_it_is_may(short_dir: Path) -> None:
    restrict = tuple(f"{action}={OTHERS},{MINE}" for action in ("purge", "evict", "get_devices"))
    async with running(short_dir, restrict=restrict) as daemon:
        client = client_as(daemon)
        await client.store(URI, b"bytes")
        assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"
        assert (await client.ask("purge"))["status"] == "PURGED"
        assert (await client.ask("get_devices"))["status"] == "OK"


CHANGES: tuple[tuple[str, dict[str, object]], ...] = (
    ("evict", {}),
    ("stage_write", {"size_bytes": 5}),
    ("append_write", {"size_bytes": 5}),
    ("commit_write", {"local_only": True}),
    ("pin", {"pinned": False}),
    ("locate", {"pinned": True}),
)


async def test_what_others_own_can_be_read_and_not_changed(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        await (await daemon.connect()).store(URI, b"bytes", pinned=True)
    async with running(short_dir, owner=(f"hypercache://team={OTHERS}",)) as daemon:
        client = client_as(daemon)
        before = (await client.status())["pools"]
        for action, fields in CHANGES:
            code, sentence = await client.refusal(action, uri=URI, **fields)
            assert code == "FORBIDDEN", action
            assert "--owner hypercache://team/=" in sentence
        assert (await client.refusal("purge"))[0] == "FORBIDDEN"
        assert await client.fetch(URI) == b"bytes"
        assert (await client.status())["pools"] == before
        await client.store("hypercache://elsewhere/a", b"other")


async def test_owners_do_with_their_own_what_they_like(short_dir: Path) -> None:
    async with running(short_dir, owner=(f"hypercache://team={OTHERS},{MINE}",)) as daemon:
        client = client_as(daemon)
        await client.store(URI, b"first")
        await client.store(URI, b"second")
        assert (await client.ask("pin", uri=URI))["status"] == "PONG"
        assert await client.fetch(URI) == b"second"
        assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"


async def test_a_batch_refuses_what_others_own_and_does_the_rest(short_dir: Path) -> None:
    theirs, mine = URI, "hypercache://mine/a"
    async with running(short_dir) as daemon:
        await (await daemon.connect()).store(theirs, b"bytes")
    async with running(short_dir, owner=(f"hypercache://team={OTHERS}",)) as daemon:
        client = await framed(daemon)
        staged = await client.ask("stage_many", suffixes=[theirs, mine], sizes=[5, 0])
        assert bits(staged["done"], 2) == [False, True]
        assert [(error["index"], error["error_code"]) for error in staged["errors"]] == [(0, "FORBIDDEN")]
        stage_ids = ["1", *staged["stage_ids"]]
        committed = await client.ask("commit_many", suffixes=[theirs, mine], stage_ids=stage_ids)
        assert bits(committed["done"], 2) == [False, True]
        assert [(error["index"], error["error_code"]) for error in committed["errors"]] == [(0, "FORBIDDEN")]
        evicted = await client.ask("evict_many", suffixes=[theirs, mine, "hypercache://mine/none"])
        assert bits(evicted["done"], 3) == [False, True, False]
        assert [(error["index"], error["error_code"]) for error in evicted["errors"]] == [(0, "FORBIDDEN")]
        assert await client.fetch(theirs) == b"bytes"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (("--allow", "no such user"), "hypercached: --allow: there is no user 'no such user'"),
        (("--restrict", "purge"), "hypercached: --restrict: 'purge' says not for whom"),
        (("--owner", "team=0"), "hypercached: --owner: 'team' is no prefix"),
    ],
)
def test_a_wrong_rule_ends_the_daemon_before_it_touches_anything(
    short_dir: Path, setting: tuple[str, str], sentence: str
) -> None:
    pool = (
        *("--pool-dir", str(short_dir / "pool"), "--ram-size", "0"),
        *("--socket", str(short_dir / "run" / "s")),
    )
    done = run_refused(*pool, *setting)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(sentence)
    assert list(short_dir.iterdir()) == []
