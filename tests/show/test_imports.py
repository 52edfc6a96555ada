"""Drawing needs no torch: a machine that only shows saved results has to load nothing of it."""

import subprocess
import sys


def test_everything_that_draws_is_imported_without_torch():
    code = (
        "import importlib, pkgutil, sys; sys.modules['torch'] = sys.modules['transformers'] = None; import whyformer.show as show; "
        "found = [m.name for m in pkgutil.walk_packages(show.__path__, 'whyformer.show.')]; "
        "[importlib.import_module(name) for name in found]; print(len(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12
