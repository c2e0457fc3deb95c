"""Checks of what an image says of itself: its user, its labels, its environment, its size."""

import re
from collections.abc import Iterator

from jobs.contract.image_hierarchy import image
from jobs.images import engine
from jobs.images.build import BASE_LABEL, COMMIT_LABEL, added_bytes
from jobs.images.checks import container
from jobs.images.checks.check import CheckFailedError, Subject

TITLE, VERSION, REVISION, BASE_NAME = (
    f"org.opencontainers.image.{key}" for key in ("title", "version", "revision", "base.name")
)

OWN_LABEL = "trainyard."
"""Beginning of the labels that name versions of a release's row."""

_OF_THE_BUILD = (BASE_LABEL, COMMIT_LABEL)
"""Labels with that beginning that name something else."""

CHILD_LIMIT_BYTES = 250_000_000
"""What a child may add: JupyterLab takes 140 to 180 MB."""

TORCH_RATIO = 1.45
"""How much an image on a plain Python may add, as a multiple of its torch wheel unpacked; compiled modules take 0.1."""

CARDS_VARIABLE = {"gaudi": "HABANA_VISIBLE_DEVICES", "cuda": "NVIDIA_VISIBLE_DEVICES"}
"""Root to the variable by which a container asks its accelerator's runtime for cards. Job definitions set none, so the
image has to."""

_SECRET = re.compile(
    r"\b\w*(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY)\w*=\S+", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s:]+:[^/@\s]+@")


def stated_user(subject: Subject) -> tuple[int, str]:
    """Return number and home of the user that the Dockerfile of the image's root names; root where it names none."""
    text = image(subject.image.root).dockerfile.read_text()
    users = re.findall(r"^USER (\d+)", text, re.MULTILINE)
    homes = re.findall(r"--home-dir (\S+)", text)
    return (int(users[-1]), homes[-1]) if users else (0, "/root")


def user(subject: Subject) -> str:
    number, _ = stated_user(subject)
    found = container.last_line(container.run(subject, ["sh", "-c", "echo $(id -u):$(id -g)"]))
    if found != f"{number}:{number}":
        raise CheckFailedError(f"it runs as {found}, and images/{subject.image.root}/Dockerfile says {number}:{number}")
    return found


def labels(subject: Subject) -> str:
    found = subject.configuration.get("Labels") or {}
    expected = {
        TITLE: f"trainyard/{subject.image.name}",
        VERSION: subject.release.name,
        REVISION: subject.revision,
        **({BASE_NAME: subject.parent} if subject.parent else {}),
    }
    arguments = {name.lower().replace("_", "-"): value for name, value in subject.release.build_arguments.items()}
    own = {name: value for name, value in found.items() if name.startswith(OWN_LABEL) and name not in _OF_THE_BUILD}
    expected |= {name: arguments.get(name.removeprefix(OWN_LABEL)) for name in own}
    wrong = [
        f"{name} is {found.get(name)!r}, not {value!r}" for name, value in expected.items() if found.get(name) != value
    ]
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    return f"revision {subject.revision}, " + ", ".join(
        f"{name.removeprefix(OWN_LABEL)} {value}" for name, value in sorted(own.items())
    )


def environment(subject: Subject) -> str:
    """Check that neither the image's variables nor the instructions in its history tell a secret."""
    told = [*(subject.configuration.get("Env") or ()), *_instructions(subject)]
    found = {match for text in told for match in (*_SECRET.findall(text), *_PASSWORD_IN_URL.findall(text))}
    if found:
        # Not what they hold.
        names = sorted(text.partition("=")[0] if "=" in text else "a password in a URL" for text in found)
        raise CheckFailedError(f"looks like a secret: {', '.join(names)}")
    return f"{len(subject.configuration.get('Env') or ())} variables and the history looked at"


def cards(subject: Subject) -> str:
    """Check that a container of the image asks for all cards, whatever its runtime does for one that asks for none."""
    name = CARDS_VARIABLE[subject.image.root]
    variables = dict(entry.split("=", 1) for entry in subject.configuration.get("Env") or ())
    if variables.get(name) != "all":
        raise CheckFailedError(
            f"{name} is {variables.get(name, 'not set')}, not all: a container of it may get no card"
        )
    return f"{name}=all"


def size_of_child(subject: Subject) -> str:
    parent = engine.size_bytes(subject.client.images.get(subject.parent))
    added = subject.size_bytes - parent
    if added > CHILD_LIMIT_BYTES:
        raise CheckFailedError(f"{_mb(added)} over its base, more than {_mb(CHILD_LIMIT_BYTES)}")
    return f"{_mb(added)} over its base of {_mb(parent)}"


def size_of_root(subject: Subject) -> str:
    """Compare what a root adds to its base with its torch wheel unpacked, whose size the wheel's own record tells."""
    unpacked = int(container.last_line(container.run_script(subject, "unpacked_size.py", "torch")))
    base = _size_of_base(subject)
    added = subject.size_bytes - base
    ratio = f"{added / unpacked:.2f} x its torch wheel unpacked ({_mb(unpacked)})"
    told = f"{_mb(added)} over its base of {_mb(base)}, {ratio}"
    if added > TORCH_RATIO * unpacked:
        raise CheckFailedError(f"{told}, more than {TORCH_RATIO} x")
    return told


def _size_of_base(subject: Subject) -> int:
    """Return the size of all below the layers of the root's own Dockerfile, whose stages stand on each other."""
    own = len(re.findall(r"^(?:RUN|COPY|ADD|WORKDIR) ", subject.image.dockerfile.read_text(), re.MULTILINE))
    return subject.size_bytes - added_bytes(subject.client.images.get(subject.name), own)


def _instructions(subject: Subject) -> Iterator[str]:
    for entry in subject.client.images.get(subject.name).history():
        yield entry["CreatedBy"]


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"
