"""The property tests' settings hold in a folder without a conftest.py of its own, whatever else is run."""

from __future__ import annotations

from hypothesis import settings


def test_no_property_test_has_a_deadline_that_a_busy_machine_could_miss() -> None:
    assert settings().deadline is None
