"""Contracts run on every mixer, the trunk and the head."""

import pytest
from subjects import SLOW, SUBJECTS


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SUBJECTS], name="subject"
)
def _subject(request):
    return SUBJECTS[request.param]
