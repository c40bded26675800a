"""Tools that only tests need, and that a user who runs them may lack. With CI=true in the environment they must be there."""
import os
import unittest


def skip_without(tool, name):
    """Skips a test where `tool`, whatever stands for it, is None or False; but not in CI, where it then fails."""
    return unittest.skipUnless(tool or os.environ.get("CI") == "true", f"{name} is not installed (scripts/requirements-dev.txt, .ci/run)")
