"""``python -m parzen`` and the command ``parzen``: what needs no torch is said before torch is imported."""

import io
import sys
from pathlib import Path

import parzen


def main() -> int:
    """Runs the command line; its exit status."""
    asked = sys.argv[1:]
    if asked not in (["-h"], ["--help"], ["--version"]):
        from parzen.cli import main as run

        return run()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if asked == ["--version"]:
        print(f"parzen {parzen.__version__}")
    else:
        # What the whole parser would say, which a test compares.
        print((Path(__file__).parent / "help.txt").read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
