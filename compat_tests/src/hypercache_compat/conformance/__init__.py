"""The conformance suite: what any daemon must do, as small functions in tables.

Rules:
1. A check speaks to the daemon over connections and under uris of its own, and asks for no flush: nothing of
   it reaches a backend.
2. A check fails with a `CheckFailed` that says what was seen; the table beside it says what that means.
3. What the daemon does not say it has is not offered, and never failed.
"""
