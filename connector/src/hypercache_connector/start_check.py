"""What LMCache's start sees to beyond the parameters themselves: that this process may use the daemon, and
may open the devices that it stores on."""

from __future__ import annotations

from hypercache_protocol import ErrorCode, Tier

from .actions import DaemonRefused
from .client import Client
from .config import Config, ConfigError
from .devices import check_access
from .outcomes import DaemonUnavailable, logger

_CHECK_TIMEOUT_S = 1.0
"""How long a start waits for a daemon that is there and does not answer."""


def check_start(settings: Config) -> None:
    """See that the daemon lets this process in, and that it may open the devices where it stores there. A
    daemon that does not answer or does not tell is no error, nor is a device that fails otherwise: both may
    come back.

    Raises:
        ConfigError: it may not; the text says what to change.
    """
    paths = _device_paths(settings)
    if settings.tier is Tier.NVME:
        for path in paths:
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


def _device_paths(settings: Config) -> list[str]:
    timeout_s = min(settings.timeout_s, _CHECK_TIMEOUT_S)
    with Client(settings.socket_path, timeout_s, version=settings.wire) as client:
        try:
            return [device.path for device in client.get_devices()]
        except DaemonUnavailable as error:
            if error.code is ErrorCode.FORBIDDEN:
                raise ConfigError(f"hypercache_connector: {settings.socket_path}: {error}") from None
            logger.warning("%s: no daemon yet, so all is a miss: %s", settings.socket_path, error)
        except DaemonRefused as error:
            logger.info("%s: the devices are not checked: %s", settings.socket_path, error)
    return []
