"""The secret of a run, and the proofs by which watchers show that they know it.

The secret is random, and is in a file of the run's folder that only its owner can read.
It is never sent: each side of a connection proves that it knows the secret, by an HMAC
of the random numbers of both sides and of its own role.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

__all__ = ["SecretError", "proof", "proves", "run_name", "shared_secret"]

_LENGTH = 64


class SecretError(Exception):
    """Raised if the file of the secret cannot be trusted."""


def shared_secret(folder: Path) -> bytes:
    """Return the secret of a folder; the first caller, on any node, creates it."""
    path = folder / "secret"
    own = folder / f".secret-{os.uname().nodename}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        own.unlink()
    file = os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(file, secrets.token_hex(_LENGTH // 2).encode())
        os.fsync(file)
    finally:
        os.close(file)
    # The link fails if another node was first, and never shows a file without its text.
    with contextlib.suppress(FileExistsError):
        os.link(own, path)
    own.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    # A link to a file of somebody else is an error.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        if about.st_uid != os.geteuid():
            raise SecretError(
                f"expected a secret {path} of user {os.geteuid()}, found one of user "
                f"{about.st_uid}; remove it, or choose a folder of your own"
            )
        if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
            raise SecretError(
                f"expected a secret {path} that only its owner can read (mode 600), "
                f"found mode {stat.S_IMODE(about.st_mode):o}; remove it, as others "
                "may know it, and start the job again"
            )
        text = os.read(file, _LENGTH + 1)
    finally:
        os.close(file)
    if len(text) != _LENGTH:
        raise SecretError(
            f"expected {_LENGTH} characters in the secret {path}, found {len(text)}; "
            "remove it, and start the job again"
        )
    return text


def run_name(secret: bytes) -> str:
    """Return the name of a run, which does not tell its secret: 16 hex digits."""
    return hashlib.sha256(b"run" + secret).hexdigest()[:16]


def proof(secret: bytes, role: str, *words: Any) -> str:
    """Return the proof of a role: an HMAC of the words that both sides know."""
    return hmac.new(secret, json.dumps([role, *words]).encode(), "sha256").hexdigest()


def proves(given: str, secret: bytes, role: str, *words: Any) -> bool:
    """Return whether a proof is that of the role and the words."""
    # Text from a connection may have characters without a code in UTF-8.
    right = proof(secret, role, *words).encode()
    return hmac.compare_digest(given.encode(errors="replace"), right)
