"""Drawing needs neither torch nor transformers, so that saved results can be shown without them."""

import subprocess
import sys


def test_show_modules_are_imported_without_torch():
    code = (
        "import importlib, pkgutil, sys; sys.modules['torch'] = sys.modules['transformers'] = None; import whyformer.show as show; "
        "found = [m.name for m in pkgutil.walk_packages(show.__path__, 'whyformer.show.')]; "
        "[importlib.import_module(name) for name in found]; print(len(found))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert int(completed.stdout) >= 12
