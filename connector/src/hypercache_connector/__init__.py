"""HyperCache's connector: the class that LMCache loads, and the synchronous client beneath it.

Importing this package needs neither LMCache nor torch.
"""

from .adapter import HyperCacheConnector
from .client import Client
from .config import ConfigError
from .connection import DaemonUnavailable

__all__ = ["Client", "ConfigError", "DaemonUnavailable", "HyperCacheConnector"]
