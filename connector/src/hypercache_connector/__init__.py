"""HyperCache's connector: the class that LMCache loads, a store of blocks for programs without LMCache, and
the synchronous client beneath both.

Importing this package needs neither LMCache nor torch.
"""

from .actions import DaemonRefused
from .adapter import HyperCacheConnector
from .client import Client
from .config import ConfigError
from .kv_store import KVStore
from .outcomes import DaemonUnavailable, Outcome

__all__ = [
    "Client",
    "ConfigError",
    "DaemonRefused",
    "DaemonUnavailable",
    "HyperCacheConnector",
    "KVStore",
    "Outcome",
]
