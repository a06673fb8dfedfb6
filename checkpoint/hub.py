"""Fetches models from the Hugging Face hub: safetensors, JSON and tokenizer files, nothing that can run code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qserve.checkpoint.errors import CheckpointError

# No *.bin and no *.py: pickles and code are never fetched.
# Files in folders, and "consolidated" ones, are the same weights in another layout.
IGNORED = ["*/*", "consolidated*"]
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[A-Za-z0-9][\w./-]*))?")


def is_hub_id(text: str) -> bool:
    """Whether ``text`` is written as ``name`` or ``organization/name``, with or without ``@revision``."""
    return _HUB_ID.fullmatch(text) is not None and "--" not in text.partition("@")[0] and ".." not in text


def split_hub_id(text: str) -> tuple[str, str | None]:
    """The id and the revision (a branch, tag or commit; None for the main branch) in a text that ``is_hub_id``."""
    match = _HUB_ID.fullmatch(text)
    assert match is not None
    return match["name"], match["revision"]


def fetch_snapshot(text: str, *, offline: bool = False) -> Path:
    """Directory of the model's files, from the hub's cache where they are there."""
    from huggingface_hub import snapshot_download

    model_id, revision = split_hub_id(text)
    with hub_errors(text):
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=PATTERNS, ignore_patterns=IGNORED,
                                      local_files_only=offline))


@contextmanager
def hub_errors(text: str) -> Iterator[None]:
    """Errors inside become one line about the model ``text``."""
    from huggingface_hub import errors as hub

    try:
        yield
    except hub.GatedRepoError:
        raise CheckpointError(
            f"{text} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from None
    except hub.RevisionNotFoundError:
        raise CheckpointError(f"{text}: the hub has the model, but no such revision") from None
    except hub.RepositoryNotFoundError:
        raise CheckpointError(f"{text} is neither a local path nor a model on the hub") from None
    except (hub.HfHubHTTPError, hub.HFValidationError) as error:
        raise CheckpointError(f"{text} cannot be fetched from the hub: {_first_line(error)}") from None
    except (
        hub.LocalEntryNotFoundError,
        hub.OfflineModeIsEnabled,
        hub.HTTPError,  # type: ignore[attr-defined]  # that of whichever HTTP library is used
        ConnectionError,
        TimeoutError,
    ):
        raise CheckpointError(
            f"{text} is no local path, is not in the hub cache, and the hub cannot be reached; "
            "give a local directory, or try again with a network"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{text} cannot be fetched from the hub: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
