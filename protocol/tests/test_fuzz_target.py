"""The target of `make fuzz` without atheris: it must not rot between two runs of that."""

import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol import RemoteProtocolError, Session

Target = Callable[[bytes], None]

LINES = st.sampled_from(
    [
        b'{"action":"ping"}\n',
        b'{"action":"hello","versions":["2.0"]}\n',
        b'{"status":"HELLO","version":"2.0"}\n',
    ]
)
FRAMES = st.sampled_from([b"\0\0\0\x08\x93\x05\xa4ping\x80", b"\0\0\0\x08\x93\x02\xa4MISS\x80", b"\xff" * 4])


@pytest.fixture(scope="module")
def target() -> Target:
    atheris = SimpleNamespace(instrument_imports=lambda include: nullcontext())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "atheris", atheris)
        fuzz: Target = runpy.run_path(str(Path(__file__).parents[1] / "fuzz" / "fuzz_sessions.py"))[
            "one_input"
        ]
        return fuzz


@given(st.integers(0, 255), st.lists(LINES | FRAMES | st.binary(max_size=30), max_size=4))
def test_a_session_stands_whatever_it_is_fed(target: Target, choice: int, pieces: list[bytes]) -> None:
    target(bytes([choice]) + b"".join(pieces))


@pytest.mark.parametrize(("choice", "is_told"), [(2, True), (0, False), (4, False)])
def test_what_a_daemon_s_session_raises_is_a_crash_and_what_a_client_s_does_is_not(
    target: Target, choice: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Session) -> None:
        raise RemoteProtocolError("this is the end")

    monkeypatch.setattr(Session, "next_event", fail)
    with pytest.raises(RemoteProtocolError) if is_told else nullcontext():
        target(bytes([choice]) + b"x\n")
