"""Model ids on the Hugging Face hub: a snapshot of safetensors, JSON and tokenizer files, nothing that runs.

Knows what can go wrong between here and the hub; does not know what the files hold.
"""

from __future__ import annotations

import re
from pathlib import Path

from qserve.checkpoint.errors import CheckpointError

# No *.bin and no *.py: neither pickles nor code are ever fetched.
# Files in folders, and "consolidated" ones, are the same weights in another layout.
IGNORED = ["*/*", "consolidated*"]
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_id(text: str) -> bool:
    """Whether ``text`` is written as ``name`` or ``organization/name``."""
    return _HUB_ID.fullmatch(text) is not None and "--" not in text and ".." not in text


def fetch_snapshot(model_id: str, *, offline: bool = False) -> Path:
    """Directory of the model's files, from the hub's cache where they are there."""
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=PATTERNS, ignore_patterns=IGNORED,
                                      local_files_only=offline))
    except hub.GatedRepoError:
        raise CheckpointError(
            f"{model_id} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from None
    except hub.RepositoryNotFoundError:
        raise CheckpointError(f"{model_id} is neither a local path nor a model on the hub") from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError, TimeoutError):
        raise CheckpointError(
            f"{model_id} is no local path, is not in the hub cache, and the hub cannot be reached; "
            "give a local directory, or try again with a network"
        ) from None
    except (hub.HfHubHTTPError, hub.HFValidationError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{model_id} cannot be fetched from the hub: {reason}") from None
