"""Settings of the property tests: no deadline, since a busy machine is not a slow program.

HYPOTHESIS_EXAMPLES=2000 looks longer than a usual run does.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "protocol",
    deadline=None,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("protocol")
