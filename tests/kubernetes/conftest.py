"""The clusters that the suite of the Kubernetes runner runs over."""

from collections.abc import AsyncIterator

import pytest
from cluster_lab import Lab, MemoryLab
from real_cluster import BINARIES, RealLab


@pytest.fixture(params=["memory", pytest.param("real", marks=[pytest.mark.slow, pytest.mark.long])])
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    if request.param == "memory":
        yield MemoryLab()
        return
    if not (BINARIES / "kube-scheduler").exists():
        pytest.skip(f"Kubernetes is not built in {BINARIES}: make test-kubernetes does that")
    real: RealLab = request.getfixturevalue("real_lab")
    await real.begin()
    yield real
    await real.end()


@pytest.fixture(scope="session")
def real_lab(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    started = RealLab(tmp_path_factory.mktemp("cluster"))
    yield started
    started.close()
