"""Which devices are in use: those that failed and those that the operator drains are given nothing new.

Rules:
1. A device fails by an error of the daemon's own I/O on it, or where a look at its first and last page every
   few seconds finds it gone, silent, cut off or another one; one that a start does without counts as failed.
   It stays out of use, over restarts too, until the operator says so (SIGHUP) and it is found in order. A
   copy takes a restart: only a new instance id has clients let go of the device that they have open.
2. What has a chunk on a failed device is withheld: nobody finds it. What may be evicted is, since its other
   chunks take up room; what no backend has, or is pinned, waits to be given back with the device.
3. Staged writes with a chunk on a failed device are dropped: their commit is refused, and they begin anew.
4. A drained device goes on serving what it has, and loses it as it may be evicted.
5. All of this is decided in the event loop; only looking at devices is left to worker threads.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import trio

from hypercache_protocol.messages import DeviceInfo
from hypercache_protocol.states import DIRTY

from .access import DeviceError
from .catalog_rows import Remember
from .core.objects import StoredObject
from .device_clearing import DeviceClearing, is_on
from .device_probe import Member, check, in_short, is_its_fault
from .drain_file import devices_to_drain
from .flusher import Flusher
from .removal import Remover
from .startup import Opened
from .store import Store

log = logging.getLogger(__name__)

_PROBE_EVERY_S = 5.0
_ANSWER_WITHIN_S = 60.0  # a device that resets itself may take half of that
_CLEAR_EVERY_S = 60.0
_SHOWN_URIS = 10
_FAILED = "failed devices"
_MISSING = "the daemon was started without it; start it again with the device in place"


class Use(str, Enum):
    """What a device is good for now."""

    IN_USE = "IN_USE"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    FAILED = "FAILED"


@dataclass
class _Device:
    index: int
    path: str
    info: DeviceInfo
    member: Member | None
    """None where the daemon was started without it."""
    failure: str | None = None
    doubt: str | None = None
    """Why it could not be told whether it is in order; said once."""
    draining: bool = False
    unsettled: bool = True
    """Whether there may be something on it that ought not to be there."""
    thread: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    """Its own: a device that hangs keeps one thread, and no more."""
    wake: trio.Event = field(default_factory=trio.Event)
    changing: trio.Lock = field(default_factory=trio.Lock)
    drain: trio.CancelScope = field(default_factory=trio.CancelScope)


class DeviceHealth:
    """Watches the devices of the pool and takes out of use what failed or is drained."""

    def __init__(
        self,
        opened: Opened,
        store: Store,
        remover: Remover,
        flusher: Flusher,
        drain_file: Path,
    ) -> None:
        self._store = store
        self._clearing = DeviceClearing(store, remover)
        self._flusher = flusher
        self._blocks = opened.blocks
        self._drain_file = drain_file
        self._devices = [
            _Device(device.index, device.path, device.info, member)
            for device, member in zip(opened.pool.devices, opened.members, strict=True)
        ]
        self._token = trio.lowlevel.current_trio_token()
        store.suspect = self._suspect
        store.look = self._look
        self._restore()
        self._read_drain_file()

    def infos(self) -> tuple[DeviceInfo, ...]:
        """The facts about the devices that have not failed."""
        return tuple(device.info for device in self._devices if device.failure is None)

    def report(self) -> list[dict[str, Any]]:
        """Each device of the pool, in its order."""
        return [
            {
                "path": device.path,
                "use": self._use(device).value,
                "failure": device.failure,
                "allocated_bytes": self._blocks.allocated_bytes(device.index),
            }
            for device in self._devices
        ]

    async def run(self) -> None:
        """Watch until cancelled."""
        async with trio.open_nursery() as nursery:
            for device in self._devices:
                nursery.start_soon(self._watch, device)
                nursery.start_soon(self._clear_when_woken, device)

    async def look_again(self) -> None:
        """Do what the operator wants: drain what the drain file names and nothing else, and put back what
        failed and is in order now."""
        try:
            self._read_drain_file()
            async with trio.open_nursery() as nursery:
                for device in self._devices:
                    if device.failure is not None:
                        nursery.start_soon(self._put_back, device)
        except Exception:  # the boundary: a fault of ours must not end the daemon
            log.exception("looking at the devices again failed by a fault of the daemon")

    async def clear(self, index: int) -> None:
        """Withhold and evict what has to leave this device by now, where it failed or is drained."""
        device = self._devices[index]
        async with device.changing:
            if device.unsettled and device.failure is not None:
                await self._leave_failed(device)
            elif device.unsettled and device.draining:
                with trio.CancelScope() as device.drain:
                    await self._leave_drained(device)

    # -- noticing --------------------------------------------------------------------------------------

    def _suspect(self, index: int, error: Exception) -> None:
        """Called in any thread, when I/O on a device failed."""
        with suppress(trio.RunFinishedError):  # then nobody has any use for it
            self._token.run_sync_soon(self._judge, self._devices[index], error)

    def _look(self, index: int) -> None:
        """Called in any thread, before something is made of I/O on a device."""
        member = self._devices[index].member
        if member is None:
            raise DeviceError(_MISSING)
        check(member)

    async def _watch(self, device: _Device) -> None:
        while True:
            await trio.sleep(_PROBE_EVERY_S)
            if device.failure is None:
                error = await self._look_at(device)
                if error is None:
                    device.doubt = None
                else:
                    self._judge(device, error)

    async def _look_at(self, device: _Device) -> Exception | None:
        """Why a device may not be in order."""
        if device.member is None:
            return DeviceError(_MISSING)
        try:
            with trio.fail_after(_ANSWER_WITHIN_S):
                await trio.to_thread.run_sync(
                    check, device.member, limiter=device.thread, abandon_on_cancel=True
                )
        except trio.TooSlowError:
            return DeviceError(f"it does not answer within {_ANSWER_WITHIN_S:g} s")
        except Exception as error:  # noqa: BLE001 - what is no fault of the device's must not end the daemon
            return error
        return None

    def _judge(self, device: _Device, error: Exception) -> None:
        if device.failure is not None:
            return
        problem = in_short(error)
        if not is_its_fault(error):
            if problem != device.doubt:
                trace = None if isinstance(error, OSError) else error
                log.warning("whether %s is in order cannot be told: %s", device.path, problem, exc_info=trace)
            device.doubt = problem
            return
        log.error(
            "THE DEVICE %s FAILED: %s. Nothing new is put on it, and what has a chunk on it is a miss. The "
            "others go on. Once it is in order again, send SIGHUP to the daemon (process %d) to put it back",
            device.path,
            problem,
            os.getpid(),
        )
        device.failure = problem
        device.drain.cancel()  # what is on it must be withheld at once
        self._apply(device)
        self._note_failures()

    # -- in use or not ---------------------------------------------------------------------------------

    def _use(self, device: _Device) -> Use:
        if device.failure is not None:
            return Use.FAILED
        if not device.draining:
            return Use.IN_USE
        return Use.DRAINING if self._blocks.allocated_bytes(device.index) else Use.DRAINED

    def _apply(self, device: _Device) -> None:
        """Have the allocator know whether a device may be given anything, and what is on it seen to."""
        if self._use(device) is Use.IN_USE:
            self._blocks.include(device.index)
        else:
            self._blocks.exclude(device.index)
            device.unsettled = True
            device.wake.set()

    def _note_failures(self) -> None:
        failures = {str(device.index): device.failure for device in self._devices if device.failure}
        self._store.catalog.post([Remember(_FAILED, json.dumps(failures), casual=False)])

    def _restore(self) -> None:
        """Take out of use what failed under a daemon before this one; nobody is served yet."""
        failures = json.loads(self._store.catalog.remembered.get(_FAILED, "{}"))
        for device in self._devices:
            device.failure = failures.get(str(device.index))
            if device.member is None:
                device.failure = "it was missing when the daemon was started"
            if device.failure is not None:
                log.error("%s is out of use: %s. SIGHUP puts back what is there", device.path, device.failure)
                self._apply(device)
        if any(device.failure for device in self._devices):
            self._note_failures()
            for stored in self._store.cache.objects():
                if self._is_unreadable(stored):
                    self._store.cache.withhold(stored.uri)

    def _read_drain_file(self) -> None:
        paths = [device.path for device in self._devices]
        wanted = devices_to_drain(self._drain_file, paths)
        for device in self._devices:
            if wanted is not None and device.draining != (device.path in wanted):
                device.draining = not device.draining
                log.info(
                    "%s is %s", device.path, "drained from now on" if device.draining else "in use again"
                )
                self._apply(device)

    async def _put_back(self, device: _Device) -> None:
        error = await self._look_at(device)
        if error is not None:
            log.error("%s stays out of use: %s", device.path, in_short(error))
            return
        async with device.changing:
            device.failure = None
            self._apply(device)
            self._note_failures()
            returned = await self._clearing.give_back(lambda stored: not self._is_unreadable(stored))
        for stored in returned:
            if stored.state in DIRTY:
                self._flusher.submit(stored.uri)
        log.info("%s is in order again, and %d objects that waited for it", device.path, len(returned))

    # -- what has to leave -----------------------------------------------------------------------------

    async def _clear_when_woken(self, device: _Device) -> None:
        while True:
            with trio.move_on_after(_CLEAR_EVERY_S):
                await device.wake.wait()
            device.wake = trio.Event()
            try:
                await self.clear(device.index)
            except Exception:  # the boundary: a fault of ours, or of the catalog, must not end the daemon
                log.exception("what is on %s could not be cleared away; it is tried again", device.path)

    async def _leave_failed(self, device: _Device) -> None:
        clearing, index = self._clearing, device.index
        await clearing.withhold_all(index)
        evicted = await clearing.evict(index, await clearing.withheld_on(index))
        waiting = await clearing.withheld_on(index)
        device.unsettled = await clearing.is_any_uploading(waiting)
        log.warning(
            "%d objects with a chunk on %s were evicted, and %d wait for it, since no backend has them or "
            "they are pinned%s",
            evicted,
            device.path,
            len(waiting),
            ": " + ", ".join(waiting[:_SHOWN_URIS]) + " …" * (len(waiting) > _SHOWN_URIS) if waiting else "",
        )

    async def _leave_drained(self, device: _Device) -> None:
        clearing, index = self._clearing, device.index
        evicted = await clearing.evict(index, await clearing.uris_on(index))
        await self._store.release_all_due()
        device.unsettled = self._use(device) is not Use.DRAINED
        if evicted or not device.unsettled:
            log.info(
                "%d objects left %s, which is drained; %d bytes are allocated on it still",
                evicted,
                device.path,
                self._blocks.allocated_bytes(index),
            )

    def _is_unreadable(self, stored: StoredObject) -> bool:
        return any(device.failure is not None and is_on(device.index, stored) for device in self._devices)
