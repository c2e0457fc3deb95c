"""Check that an image has no unwanted files. The user may read every file."""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock", "/scratch")
"""Folders with the sticky bit: everyone may write there, but not change other users' files."""

CACHES = (".cache/pip", ".cache/uv", ".npm", ".cargo")
"""Caches in a home folder."""

SECRET_NAMES = re.compile(
    r"\.netrc|\.pypirc|\.npmrc|\.git-credentials|\.pgpass|\.env|\.dockercfg|id_(rsa|dsa|ecdsa|ed25519)|"
    r".*\.(p12|pfx|kdbx|ppk)"
)
SECRET_PATHS = re.compile(r".*/(\.aws/credentials|\.docker/config\.json|\.huggingface/token|huggingface/token)")
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
KEY_NAMES = re.compile(r".*\.(pem|key|crt|cert)")
KEY_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def files() -> Mapping[str, os.stat_result]:
    """All files and folders of the image, except links and the test's own files."""
    found: dict[str, os.stat_result] = {}
    device = os.lstat("/").st_dev
    for folder, folders, names in os.walk("/"):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode) or status.st_dev != device or path == str(HERE):
                if name in folders:
                    folders.remove(name)
            else:
                found[path] = status
    return found


def test_files_are_writable_only_by_their_owner(files: Mapping[str, os.stat_result]) -> None:
    writable = [path for path, status in files.items() if status.st_mode & stat.S_IWOTH]
    assert [path for path in writable if not (files[path].st_mode & stat.S_ISVTX and path in SHARED_FOLDERS)] == []


def test_job_user_owns_only_its_home(files: Mapping[str, os.stat_result], facts: dict[str, Any]) -> None:
    user, home = facts["user"], facts["home"]
    if user == 0:
        pytest.skip("the image runs as root, which owns everything; its Dockerfile explains why")
    owned = [path for path, status in files.items() if status.st_uid == user]
    assert [path for path in owned if path != home and not path.startswith(f"{home}/")] == []


def test_no_file_has_credentials_or_a_private_key(files: Mapping[str, os.stat_result]) -> None:
    assert [path for path, status in files.items() if stat.S_ISREG(status.st_mode) and is_secret(path, status)] == []


def is_secret(path: str, status: os.stat_result) -> bool:
    name = os.path.basename(path)
    if SECRET_NAMES.fullmatch(name) or SECRET_PATHS.fullmatch(path):
        return status.st_size > 0
    if KEY_NAMES.fullmatch(name) and status.st_size <= KEY_BYTES:
        return bool(PRIVATE_KEY.search(Path(path).read_bytes()))
    return False


def test_build_left_no_caches_and_no_temporary_files(files: Mapping[str, os.stat_result]) -> None:
    homes = ["/root", *map(str, Path("/home").glob("*"))]
    left = [f"{home}/{cache}" for home in homes for cache in CACHES if f"{home}/{cache}" in files]
    left += [
        path
        for path in files
        if re.fullmatch(r"/var/lib/apt/lists/.*_Packages.*|/var/cache/apt/archives/.*\.deb", path)
    ]
    left += [path for path in files if re.fullmatch(r"/tmp/[^/]+", path)]
    assert left == []
