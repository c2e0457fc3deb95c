"""Find calls of CUDA in a script's code before it is submitted to HPUs, which lack them."""

import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from jobs.core.stage import DeployedStage
from jobs.core.words import counted
from jobs.runs.secrets import MAX_CHECKED_BYTES
from jobs.spec.code import Pack
from jobs.spec.kinds.script import Script
from jobs.spec.spec import JobSpec

MIGRATION_VARIABLE = "PT_HPU_GPU_MIGRATION"
"""Set to 1, it lets Habana's GPU Migration Toolkit replace CUDA calls (docs.habana.ai, GPU Migration Toolkit)."""

_CUDA = re.compile(
    r"torch\.cuda\.(?!manual_seed|empty_cache|amp\b)\w+|\.cuda\(|[\"'](?:nccl|cuda(?::\d+)?)[\"']|f[\"']cuda:"
)
"""Code that fails on an HPU, or leaves the script on the CPU. Calls without effect there are left out."""

_IMPORT = re.compile(r"^\s*(?:from\s+(\.*)([\w.]*)\s+import\s+\(?([^#\n]*)|import\s+([^#\n]*))", re.MULTILINE)
_WORD, _DOTTED = re.compile(r"\w+"), re.compile(r"[\w.]+")

_KNOWS_HPUS = re.compile(r"\bhpu\b|habana|gpu_migration")

_NAMED = 3


def cuda_note(stage: DeployedStage, spec: JobSpec, pack: Pack | None) -> list[str]:
    """Return a note that names a script's CUDA calls with file and line, if its stage has HPUs.

    Only the script and the modules that it imports from the code are read. Files that mention HPUs are skipped, and a
    script that mentions them handles them in its modules too.
    """
    arguments = spec.entrypoint_arguments()
    if pack is None or not isinstance(arguments, Script) or stage.instance_type.accelerator != "hpu":
        return []
    if spec.env.get(MIGRATION_VARIABLE, "0") != "0":
        return []
    files = {file.name for file in pack.files if file.name.endswith(".py") and file.bytes <= MAX_CHECKED_BYTES}
    calls: list[str] = []
    for name in _imported(pack.folder, files, arguments):
        text = (pack.folder / name).read_text(errors="replace")
        if _KNOWS_HPUS.search(text):
            if name == arguments.script:
                return []
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if found := _CUDA.search(line.partition("#")[0]):
                calls.append(f"{name}:{number} ({found[0]})")
    if not calls:
        return []
    more = f" and {counted(len(calls) - _NAMED, 'more line')}" if len(calls) > _NAMED else ""
    note = (
        "the code is for CUDA, but the stage has HPUs, on which it fails or trains on the CPU: "
        f"{', '.join(calls[:_NAMED])}{more}. See 'From a CUDA script to Gaudi' in jobs/docs/scripts.md"
    )
    return [note]


def _imported(folder: Path, files: Collection[str], arguments: Script) -> list[str]:
    """Return the script and the files that it imports, directly or not; all files if the command is another program."""
    module = arguments.words[1].replace(".", "/") if arguments.words[0] == "-m" and arguments.words[1:] else None
    begins = [f"{module}.py", f"{module}/__main__.py", f"src/{module}.py"] if module else [arguments.script or ""]
    found = [name for name in begins if name in files]
    if not found:
        return sorted(files)
    roots = {PurePosixPath(found[0]).parent, PurePosixPath("."), PurePosixPath("src"), PurePosixPath(arguments.folder)}
    for name in found:  # grows while it is read
        for dots, package, names, modules in _IMPORT.findall((folder / name).read_text(errors="replace")):
            bases = {PurePosixPath(name).parents[min(len(dots), name.count("/") + 1) - 1]} if dots else roots
            paths = [package, *(f"{package}.{each}" for each in _WORD.findall(names)), *_DOTTED.findall(modules)]
            places = [base / path.strip(".").replace(".", "/") for base in bases for path in paths]
            files_of = [str(end) for place in places for end in (f"{place}.py", place / "__init__.py")]
            found += [each for each in dict.fromkeys(files_of) if each in files and each not in found]
    return found
