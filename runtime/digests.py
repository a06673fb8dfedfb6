"""``chain_digests``: the names under which blocks of tokens are found again, here, in a tier, or at another replica."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def chain_digests(
    token_ids: Sequence[int], block_size: int, *, salt: str = "", parent: bytes | None = None
) -> list[bytes]:
    """One digest per full block of ``token_ids``, each over its predecessor's digest and its own tokens.

    Equal digests therefore mean equal token histories under the same salt (blake2b, 256 bits: no collision can be
    found, so nobody can craft a prompt that reads another's cache). ``parent`` is the digest of the block before the
    first; None starts a chain from ``salt``.
    """
    digest = parent or hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    digests = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = array("q", token_ids[start : start + block_size]).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=32).digest()
        digests.append(digest)
    return digests
