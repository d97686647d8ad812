"""Contracts run on every mixer, the trunk and the head."""

import pytest
from subjects import SUBJECTS


@pytest.fixture(params=SUBJECTS, name="subject")
def _subject(request):
    return SUBJECTS[request.param]
