"""``python -m rlsample.cli``: the same as ``rlsample``."""

from rlsample.cli import main

if __name__ == "__main__":
    main()
