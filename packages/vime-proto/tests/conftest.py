"""Settings of property tests: small, and indifferent to how busy the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "vime", max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("vime")
