"""What the server promises under load and misuse, measured: ``python -m tests.reliability --help``."""
