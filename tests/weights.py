"""The folder, outside of the project, that caches weights made by tests."""

import os
from pathlib import Path

CACHE = Path(os.environ.get("WHYFORMER_TEST_MODELS", "~/.cache/whyformer-test-models")).expanduser()
