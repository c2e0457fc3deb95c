"""Save and load sharded states (FSDP2, tensor parallelism) in the format of torch.distributed.checkpoint (DCP).

    checkpoint-N/shards/__R_0.distcp    the parts that rank R has written
    checkpoint-N/shards/.metadata       written last, by rank 0: which file has which part of which tensor

Each rank copies its parts to host memory, and a thread writes them while the training continues. DCP's planner decides
which rank writes what, as in `dcp.save`. The ranks exchange their plans through the job's store: a thread cannot use
the training's process group, and a separate group would be destroyed with it at the end of a script.

DCP reads the parts with any number of ranks.
"""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from jobs.core.errors import TrainyardError

if TYPE_CHECKING:
    from jobs.container.rank import Rank

FOLDER = "shards"


def is_sharded(item: Any) -> bool:
    """Return whether a module, an optimizer or a state contains a DTensor, which is spread over the ranks."""
    return any(hasattr(tensor, "placements") for tensor in tensors_of(item))


def tensors_of(item: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors of a module, an optimizer or a nested state."""
    if isinstance(item, torch.Tensor):
        yield item
        return
    parts: Iterable[Any] = ()
    if isinstance(item, Mapping):
        parts = item.values()
    elif isinstance(item, (list, tuple)):
        parts = item
    elif isinstance(item, torch.nn.Module):
        parts = item.parameters()
    elif isinstance(item, torch.optim.Optimizer):
        parts = item.param_groups
    for part in parts:
        yield from tensors_of(part)


def states_of(objects: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the states of the named objects in DCP's form, with parameter names in the states of optimizers.

    `objects` must contain the models of its optimizers. The state of any other object is its `state_dict()`, or the
    object itself if it has none.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    states: dict[str, Any] = {}
    for name in sorted(names):
        item = objects[name]
        if isinstance(item, torch.nn.Module):
            states[name] = get_model_state_dict(item)
        elif isinstance(item, torch.optim.Optimizer):
            states[name] = get_optimizer_state_dict(_model_of(name, item, objects), item)
        else:
            states[name] = item.state_dict() if hasattr(item, "state_dict") else item
    return states


def saved_names(folder: Path) -> set[str]:
    """Return the names of the sharded objects in a folder, which may not exist."""
    if not folder.exists():
        return set()
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return {name.partition(".")[0] for name in FileSystemReader(folder).read_metadata().state_dict_metadata}


def load(folder: Path, objects: Mapping[str, Any], names: Iterable[str]) -> None:
    """Load the named objects from shards written by any number of ranks. All ranks call it.

    Raises TrainyardError if the shards have other tensors than the objects.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_into

    states = states_of(objects, names)
    try:
        load_into(states, storage_reader=FileSystemReader(folder))
    except CheckpointException as error:  # not an Exception
        reason = next(iter(error.failures.values()))[0]
        raise TrainyardError(
            f"{' and '.join(map(repr, states))} cannot be loaded from {folder.parent.name}: {reason}",
            next_step="restore the model and the optimizer that the script has saved",
        ) from error
    for name, state in states.items():
        item = objects[name]
        if isinstance(item, torch.nn.Module):
            set_model_state_dict(item, state)
        elif isinstance(item, torch.optim.Optimizer):
            set_optimizer_state_dict(_model_of(name, item, objects), item, state)
        elif hasattr(item, "load_state_dict"):
            item.load_state_dict(state)


class ShardWriter:
    """One rank's part in writing sharded states. All ranks call the same methods in the same order."""

    def __init__(self, rank: "Rank") -> None:
        self.rank = rank
        self._copy: dict[str, Any] | None = None

    def copy(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of this rank's parts in host memory. Reuses the previous copy's memory."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        stager = BlockingAsyncStager(cache_staged_state_dict=self._copy is not None)
        stager.state_dict_cache = self._copy
        self._copy = stager.stage(dict(states))
        return self._copy

    def write(self, states: Mapping[str, Any], folder: Path, *, key: str) -> None:
        """Write this rank's parts into `folder`, which may be on this node only. `key` identifies the save."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        rank, store = self.rank, self.rank.connect_store()
        # The files are uploaded and removed soon, so nothing is gained by waiting for the disk.
        writer = FileSystemWriter(folder, sync_files=False)
        # Buffers may differ between ranks (BatchNorm). Rank 0's are saved, like those of other states.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        planner.set_up_planner(dict(states), writer.storage_meta(), rank.is_first)
        writer.set_up_storage_writer(rank.is_first)

        def send(key: str, value: Any) -> None:
            store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes too

        def received(key: str) -> Any:
            value = pickle.loads(store.get(key))  # noqa: S301 - from a rank of this job
            store.delete_key(key)
            return value

        def gathered(name: str, own: Any) -> list[Any]:
            """Return the values of all ranks on rank 0."""
            send(f"{key}/{name}/{rank.rank}", own)
            if not rank.is_first:
                return []
            keys = [f"{key}/{name}/{number}" for number in range(rank.world_size)]
            return [received(each) for each in keys]

        plans = gathered("plan", writer.prepare_local_plan(planner.create_local_plan()))
        metadata = None
        if rank.is_first:
            plans, metadata = planner.create_global_plan(plans)
            for number, plan in enumerate(writer.prepare_global_plan(plans)):
                send(f"{key}/planned/{number}", plan)
        plan = planner.finish_plan(received(f"{key}/planned/{rank.rank}"))
        written = writer.write_data(plan, planner).wait()
        all_written = gathered("written", written)
        if metadata is not None:
            writer.finish(metadata, all_written)


def local_parts(states: Any) -> Any:
    """Return the states with each tensor replaced by this rank's part."""
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.to_local() if hasattr(tensor, "placements") else tensor, states
    )


def _model_of(name: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model with an optimizer's parameters: one of `objects`, or several combined."""
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    models = [
        item
        for _, item in sorted(objects.items())
        if isinstance(item, torch.nn.Module) and owned & {id(parameter) for parameter in item.parameters()}
    ]
    if not models:
        raise TrainyardError(
            f"'{name}' is sharded, and the model that it optimizes was not given",
            next_step=f"pass both to trainyard.Run: run.save(step, model=model, {name}={name})",
        )
    return models[0] if len(models) == 1 else torch.nn.ModuleList(models)
