"""The table of checks, one file for each theme."""

from __future__ import annotations

from ..check import Check
from . import batches, damage, deleting, identity, keeping, replacing, sizes, trust

CHECKS: tuple[Check, ...] = (
    *sizes.CHECKS,
    *identity.CHECKS,
    *trust.CHECKS,
    *damage.CHECKS,
    *replacing.CHECKS,
    *batches.CHECKS,
    *deleting.CHECKS,
    *keeping.CHECKS,
)
