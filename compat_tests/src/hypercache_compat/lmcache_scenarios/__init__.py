"""What LMCache does with the connector, as functions that run in a process of its own (`scenario_host`).

The adapter is made by LMCache's own factory from the configuration that its users write.
"""


def after_each() -> None:
    """Nothing is left behind: adapters are kept from call to call on purpose, and closed by `close`."""
