"""The presence table: what clients read instead of asking must be what the daemon would say."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hypercache_protocol.batches import GetPresenceTable, PresenceTableReply
from hypercache_protocol.messages import ErrorReply, Evict, EvictedReply
from hypercache_protocol.presence import FORMAT, Geometry, Presence, TableView
from hypercache_protocol.versions import WIRE_2_2

from .checks import ODD_SIZE, Bench, Check, stage, store, store_checked
from .shell import CheckFailed, Connection, NotOffered, expect


@contextmanager
def _descriptor(connection: Connection) -> Iterator[int]:
    """The one descriptor that came."""
    descriptors = connection.take_descriptors()
    try:
        if len(descriptors) != 1:
            raise CheckFailed(f"{len(descriptors)} descriptors came with PRESENCE_TABLE, not one")
        yield descriptors[0]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _asked(bench: Bench) -> tuple[Connection, PresenceTableReply]:
    connection, _ = bench.connect_framed(WIRE_2_2)
    answer = connection.ask(GetPresenceTable())
    if isinstance(answer.reply, ErrorReply):
        raise NotOffered(f"the daemon has no presence table: {answer.reply.error_message}")
    if not isinstance(answer.reply, PresenceTableReply):
        raise CheckFailed(f"get_presence_table was answered with {answer.reply.status}")
    if answer.reply.table_format != FORMAT:
        raise NotOffered(f"the table has format {answer.reply.table_format}, which this tool does not know")
    return connection, answer.reply


def _view(reply: PresenceTableReply, descriptor: int) -> TableView:
    size_bytes = os.fstat(descriptor).st_size
    try:
        memory = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        return TableView(memoryview(memory), Geometry(reply.seed, reply.buckets))
    except (OSError, ValueError) as error:
        raise CheckFailed(f"the table cannot be read: {error}") from None


def table(bench: Bench) -> None:
    """The presence table has what is committed, tells what has checksums from what has none, and has neither
    what is only staged nor what is evicted. No client can change it."""
    lines = bench.connect()
    names = ["checked", "unchecked", "staged", "evicted", "absent"]
    uris = {name: bench.uri(name) for name in names}
    store_checked(lines, uris["checked"])
    store_checked(lines, uris["evicted"])
    connection, reply = _asked(bench)
    with _descriptor(connection) as descriptor:
        view = _view(reply, descriptor)
        check_sealed(descriptor, view.geometry.size_bytes)
        store(lines, uris["unchecked"], ODD_SIZE)
        stage(lines, uris["staged"], ODD_SIZE)
        lines.get(Evict(uri=uris["evicted"]), EvictedReply)
        wanted = dict.fromkeys(names, Presence.ABSENT)
        wanted |= {"checked": Presence.VERIFIABLE, "unchecked": Presence.UNVERIFIABLE}
        if view.unplaced:
            raise NotOffered("the table is too small for what the daemon has, so it may lack anything")
        for name, said in zip(names, view.look_up([uri.encode() for uri in uris.values()]), strict=True):
            expect(
                said == wanted[name],
                f"the table calls an object that is {name} {Presence(said).name.lower()}, "
                f"not {wanted[name].name.lower()}",
            )


def check_sealed(descriptor: int, size_bytes: int) -> None:
    """Nothing where whoever has this descriptor can neither write to the table nor change its size.

    Raises:
        CheckFailed: they can.
    """
    with suppress(OSError):
        os.ftruncate(descriptor, size_bytes - 1)
        raise CheckFailed("a client can make the table shorter, which would end all who read it")
    with suppress(OSError):
        os.pwrite(descriptor, os.pread(descriptor, 1, 0), 0)
        raise CheckFailed("a client can write to the table")
    with suppress(OSError, ValueError):
        mmap.mmap(descriptor, size_bytes)
        raise CheckFailed("a client can map the table so that it may write to it")


CHECKS = (
    Check(
        "presence.table",
        table,
        "Lookups may find what is not there, and so cost a load each, or miss what is.",
        WIRE_2_2,
        feature="presence_table",
    ),
)
