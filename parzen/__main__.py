"""``python -m parzen``."""

from parzen.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
