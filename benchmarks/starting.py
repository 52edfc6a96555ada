"""Processor time of the command line, start and end included, beside what importing torch and a model's class takes.

    OMP_NUM_THREADS=1 python benchmarks/starting.py --runs 5

Each command is run in a fresh process, in turn; the fastest and the median of the runs are printed, in seconds.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHELL = "import sys; sys.argv[0] = 'whyformer'; from whyformer.apps.cli import main; main()"
PICTURE = str(Path(__file__).parents[1] / "examples" / "pictures" / "digits_37.png")
COMMANDS = {
    "whyformer explain, a text": (SHELL, "explain", "a charming film", "--model", "bundled:sst2"),
    "whyformer explain, a picture": (SHELL, "explain", PICTURE, "--model", "bundled:digits"),
    "whyformer methods": (SHELL, "methods"),
    "import torch": ("import torch",),
    "import torch, transformers' BERT": ("import torch, transformers.models.bert.modeling_bert",),
}


def processor_time(words: tuple[str, ...], folder: str) -> float:
    """Seconds of processor time that a fresh Python takes for ``-c`` and these words."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", *words], cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each command, after one that is not counted")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        rounds = [{name: processor_time(words, folder) for name, words in COMMANDS.items()} for _ in range(runs + 1)]
    print("| | fastest | median |\n|---|---:|---:|")
    for name in COMMANDS:
        seconds = [one[name] for one in rounds[1:]]
        print(f"| {name} | {min(seconds):.2f} | {statistics.median(seconds):.2f} |")


if __name__ == "__main__":
    main()
