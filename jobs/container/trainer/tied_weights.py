"""Weights that a model has in two places, as BERT has its embeddings in the decoder: kept one, and looked at.

On its way to another kind of device PyTorch makes new parameters, one for each place (torch.nn.Module.to). Two places
then learn apart, and what is reported is the loss of another model than the saved one, which has one of them.
"""

from typing import Any

from jobs.core.errors import TrainyardError


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
            next_step="report this with the release of the image",
        )
