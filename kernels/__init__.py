"""Hot numeric operations, a slow reference for each, and the registry that chooses between them."""

if not __name__.startswith("qserve."):
    # With the repository's root on sys.path this folder shadows a PyPI package of the same name, and
    # transformers asks any importable `kernels` for its version: an empty one is too old for it, an error is fatal.
    __version__ = "0"
    __path__ = []
