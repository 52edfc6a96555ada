"""Where weights that tests make are kept; not in the project."""

import os
from pathlib import Path

CACHE = Path(os.environ.get("WHYFORMER_TEST_MODELS", "~/.cache/whyformer-test-models")).expanduser()
