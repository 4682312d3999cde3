"""What LMCache's start sees to beyond the parameters themselves: that this process may open the devices."""

from __future__ import annotations

from .actions import DaemonRefused
from .client import Client
from .config import ConfigError, EngineConfig
from .devices import check_access
from .outcomes import DaemonUnavailable, logger

_CHECK_TIMEOUT_S = 1.0
"""How long a start waits for a daemon that is there and does not answer."""


def check_devices(settings: EngineConfig) -> None:
    """See that this process may open the daemon's devices. A daemon that does not answer or does not tell is
    no error, nor is a device that fails otherwise: both may come back.

    Raises:
        ConfigError: it may not; the text says what to change.
    """
    for path in _device_paths(settings):
        _check_device(path)


def _check_device(path: str) -> None:
    try:
        check_access(path)
    except PermissionError as error:
        raise ConfigError(
            f"hypercache_connector: this user may not open the daemon's device {path} ({error.strerror}): "
            "add it to the group of hypercached's --group, or let it read and write the device"
        ) from None
    except OSError as error:
        logger.warning("%s cannot be opened: %s; what lies there is a miss", path, error.strerror)


def _device_paths(settings: EngineConfig) -> list[str]:
    timeout_s = min(settings.timeout_s, _CHECK_TIMEOUT_S)
    with Client(settings.socket_path, timeout_s, version=settings.wire) as client:
        try:
            return [device.path for device in client.get_devices()]
        except DaemonUnavailable as error:
            logger.warning("%s: no daemon yet, so all is a miss: %s", settings.socket_path, error)
        except DaemonRefused as error:
            logger.info("%s: the devices are not checked: %s", settings.socket_path, error)
    return []
