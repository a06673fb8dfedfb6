"""``python -m qserve`` is the command line."""

from qserve.cli import main

if __name__ == "__main__":
    main()
