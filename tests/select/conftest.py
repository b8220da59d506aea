from __future__ import annotations

import pytest
from stage import LAYOUTS, Layout


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    """Every order of segments worth a look."""
    found: Layout = request.param
    return found
