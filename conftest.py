"""Settings of the property tests, in every folder and however they are run: no deadline, since a busy machine
is not a slow program.

HYPOTHESIS_EXAMPLES=2000 looks longer than a usual run does, where a test does not say how many it takes.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "hypercache",
    deadline=None,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hypercache")
