"""The secret of a run has one owner, and nobody else can read it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcstrat.elastic.watching import watch_secret
from hpcstrat.elastic.watching.watch_secret import SecretError, shared_secret


def test_all_callers_get_the_same_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Threads stand for nodes, whose temporary files have different names.
    numbers = iter(range(100))
    monkeypatch.setattr(os, "getpid", lambda: next(numbers))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(shared_secret, [tmp_path] * 32))
    assert len(found) == 1
    assert os.listdir(tmp_path) == ["secret"]
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    shared_secret(tmp_path)
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(SecretError, match="found mode"):
        shared_secret(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    shared_secret(tmp_path)
    os.chown(tmp_path / "secret", 12345, -1)
    with pytest.raises(SecretError, match="found one of user 12345"):
        shared_secret(tmp_path)


def test_a_link_and_a_short_secret_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shared_secret(tmp_path / "other")
    (tmp_path / "secret").symlink_to(tmp_path / "other/secret")
    with pytest.raises(OSError, match="secret"):
        shared_secret(tmp_path)
    (tmp_path / "secret").unlink()
    (tmp_path / "secret").touch(0o600)
    with pytest.raises(SecretError, match="expected 64 characters"):
        shared_secret(tmp_path)


def test_a_proof_fits_one_role_and_its_words_only() -> None:
    secret, other = b"a" * 64, b"b" * 64
    given = watch_secret.proof(secret, "connector", "x", "y")
    assert watch_secret.proves(given, secret, "connector", "x", "y")
    for wrong in (
        (other, "connector", "x", "y"),
        (secret, "acceptor", "x", "y"),
        (secret, "connector", "xy", ""),
        (secret, "connector", "y", "x"),
    ):
        assert not watch_secret.proves(given, *wrong)
    # A proof from a connection may be any text.
    assert not watch_secret.proves("\u00e9", secret, "connector", "x", "y")
