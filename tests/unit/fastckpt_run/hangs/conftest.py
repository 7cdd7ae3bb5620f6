import pytest

from fastckpt._core import metrics


@pytest.fixture
def events():
    found = []
    metrics.listen(found.append)
    yield found
    metrics.unlisten(found.append)
