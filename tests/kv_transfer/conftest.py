"""The checks that tests share assert as tests do, under PYTHONOPTIMIZE=1 too."""

import pytest

pytest.register_assert_rewrite(
    "tests.kv_transfer.conformance",
    "tests.kv_transfer.fake_device",
    "tests.kv_transfer.rig",
    "tests.kv_transfer.stranger",
)
