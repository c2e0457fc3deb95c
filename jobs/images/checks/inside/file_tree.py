"""Walks the files of an image, as a user who may read them all, and prints what should not be there, as JSON.

Takes {"user": uid of the job, "home": its home}; a uid of 0 owns everything, so nothing is said of what it may write.
"""

import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path

HERE = Path(__file__).parent

SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock", "/scratch")  # noqa: S108 - looked at, not written to
"""With the sticky bit: everybody may write there, and nobody may touch what is another's."""

BUILD_TOOLS = (
    *("as", "bazel", "c++", "cargo", "cc", "clang", "clang++", "cmake", "g++", "gcc", "git", "go", "javac", "ld"),
    *("make", "meson", "ninja", "node", "npm", "nvcc", "rustc", "yarn"),
)

CACHES = (".cache/pip", ".cache/uv", ".npm", ".cargo")
"""In a home."""

SECRET_NAMES = re.compile(
    r"\.netrc|\.pypirc|\.npmrc|\.git-credentials|\.pgpass|\.env|\.dockercfg|id_(rsa|dsa|ecdsa|ed25519)|"
    r".*\.(p12|pfx|kdbx|ppk)"
)
SECRET_PATHS = re.compile(r".*/(\.aws/credentials|\.docker/config\.json|\.huggingface/token|huggingface/token)")
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
KEY_NAMES = re.compile(r".*\.(pem|key|crt|cert)")
KEY_BYTES = 64 * 1024


def is_secret(path: Path, status: os.stat_result) -> bool:
    if SECRET_NAMES.fullmatch(path.name) or SECRET_PATHS.fullmatch(str(path)):
        return status.st_size > 0
    if KEY_NAMES.fullmatch(path.name) and status.st_size <= KEY_BYTES:
        return bool(PRIVATE_KEY.search(path.read_bytes()))
    return False


def walk(user: int, home: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"world_writable": [], "writable": [], "secrets": []}
    device = Path("/").stat().st_dev
    for folder, folders, files in os.walk("/"):
        kept = []
        for name in [*folders, *files]:
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) or status.st_dev != device or path == HERE:
                continue
            if name in folders:
                kept.append(name)
            if status.st_mode & stat.S_IWOTH and not (status.st_mode & stat.S_ISVTX and str(path) in SHARED_FOLDERS):
                found["world_writable"].append(str(path))
            elif user and status.st_uid == user and not (str(path) + "/").startswith(home + "/"):
                found["writable"].append(str(path))
            if stat.S_ISREG(status.st_mode) and is_secret(path, status):
                found["secrets"].append(str(path))
        folders[:] = kept
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    result = walk(asked["user"], asked["home"].rstrip("/"))
    homes = ["/root", *map(str, Path("/home").glob("*"))]
    caches = [f"{home}/{cache}" for home in homes for cache in CACHES]
    lists = Path("/var/lib/apt/lists")
    packages = [str(path) for path in lists.glob("*_Packages*")] if lists.is_dir() else []
    result["leftovers"] = [
        *filter(os.path.exists, caches),
        *packages,
        *map(str, Path("/var/cache/apt/archives").glob("*.deb")),
    ]
    result["leftovers"] += [str(path) for path in Path(SHARED_FOLDERS[0]).iterdir() if path != HERE]
    result["build_tools"] = [tool for tool in map(shutil.which, BUILD_TOOLS) if tool]
    print(json.dumps(result))
