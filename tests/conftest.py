"""What all tests share: hypothesis judges answers, never how long they took on a machine that others use too."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
