"""Makes pytest explain the assertions of the helper modules too."""

import pytest

pytest.register_assert_rewrite("completeness", "harness", "table")
