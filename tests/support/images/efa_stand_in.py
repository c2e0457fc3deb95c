"""A stand-in for AWS's EFA installer, which cannot be downloaded everywhere, on a mirror on loopback.

It has what images/shared/install-efa relies on: the archive's name and folder, `efa_installer.sh`, libfabric in
/opt/amazon/efa/lib, and a package of aws-ofi-nccl for Ubuntu 22.04 in DEBS/UBUNTU2204/x86_64 with the plugin in
/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu. Sources: EC2's user guide ("Get started with EFA and NCCL"), and public
Dockerfiles on the real installer (container/templates/aws.Dockerfile of ai-dynamo/dynamo, 1.docker of
aws-samples/awsome-distributed-training). libfabric is Debian's, the plugin is any library that loads.
"""

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from infra.machine_image.build import efa_installer
from tests.support.http_server import QuietHandler, serving
from tests.support.images.source_tree import SourceTree

PLUGIN = "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so"
ARGUMENTS = "/opt/amazon/efa_arguments"
"""File in which the stand-in records its arguments."""

_INSTALLER = f"""#!/bin/bash
set -e
apt-get install -yq --no-install-recommends libfabric1
mkdir -p /opt/amazon/efa/lib
mv /usr/lib/*/libfabric.so.1* /opt/amazon/efa/lib/
ldconfig
echo "$*" >{ARGUMENTS}
"""
_LIBRARY = Path("/lib/x86_64-linux-gnu/libz.so.1")


class _Quiet(QuietHandler, SimpleHTTPRequestHandler):
    """Serves the files of a folder."""


@contextmanager
def efa_mirror(tree: SourceTree, folder: Path) -> Iterator[str]:
    """Serve the stand-in, pin it in `tree`, and yield the mirror's address."""
    name = f"aws-efa-installer-{efa_installer()[0]}.tar.gz"
    package = folder / "package"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "DEBIAN/control").write_text(
        "Package: libnccl-ofi\nVersion: 1.15.0-1\nArchitecture: amd64\nMaintainer: nobody\nDescription: a stand-in\n"
    )
    (package / PLUGIN).parent.mkdir(parents=True)
    (package / PLUGIN).write_bytes(_LIBRARY.resolve().read_bytes())
    deb = folder / "libnccl-ofi_1.15.0-1_amd64.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", package, deb], check=True, capture_output=True)
    served = folder / "mirror"
    served.mkdir()
    with tarfile.open(served / name, "w:gz") as archive:
        for path, mode, content in (
            ("efa_installer.sh", 0o755, _INSTALLER.encode()),
            (f"DEBS/UBUNTU2204/x86_64/{deb.name}", 0o644, deb.read_bytes()),
        ):
            member = tarfile.TarInfo(f"aws-efa-installer/{path}")
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    checksum = hashlib.sha256((served / name).read_bytes()).hexdigest()
    tree.write("images/shared/efa-installer.sha256", f"{checksum}  {name}\n")
    tree.commit()
    with serving(partial(_Quiet, directory=str(served))) as port:
        yield f"http://localhost:{port}"
