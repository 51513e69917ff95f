"""A folder as a bucket."""

from pathlib import Path

import pytest

from composer_stages.runs.bucket import Bucket, open_bucket


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(f"file://{tmp_path}/run")
