"""Weights that a model has in two places, as BERT has its embeddings in the decoder: kept one, and looked at.

On its way to another kind of device PyTorch makes new parameters, one for each place (torch.nn.Module.to). Two places
then learn apart, and what is reported is the loss of another model than the saved one, which has one of them.
"""

from typing import Any

from jobs.contract.errors import TrainyardError


def place(model: Any, device: Any) -> Any:
    """Move a model to a device, and tie again what that parts. Return it.

    A move to where it is already, or to another type of numbers, parts nothing.
    """
    model.to(device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def check(model: Any) -> None:
    """Raise TrainyardError where embeddings and decoder should be one and are two. `model` may be wrapped."""
    while hasattr(model, "module"):
        model = model.module
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    decoder = model.get_output_embeddings()
    if decoder is not None and decoder.weight is not model.get_input_embeddings().weight:
        raise TrainyardError(
            "the model's decoder has weights of its own, though its configuration ties them to the embeddings: its "
            "losses would not be those of the model that is saved",
            next_step="train it without deepspeed_zero_stage, and report this with the release of the image",
        )
