"""The failure suite and the soak: see docs/failures.md."""
