"""What the server promises under load and misuse, measured: ``python -m qserve.evals.reliability --help``."""
