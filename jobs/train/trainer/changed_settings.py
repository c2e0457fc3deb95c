"""A run that is resumed with other arguments than its checkpoint was made with, on request."""

from typing import Any


def with_own_settings(trainer_class: type[Any]) -> type[Any]:
    """The Trainer class that takes from a checkpoint's optimizer and scheduler how far they are, and nothing else.

    They were saved with the learning rate and the weight decay of their time, and would go on with those.
    """

    class OwnSettingsTrainer(trainer_class):  # type: ignore[misc]  # the class is chosen at run time
        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> Any:
            settings = [
                {name: value for name, value in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ]
            peaks = list(self.lr_scheduler.base_lrs)
            loaded = super()._load_optimizer_and_scheduler(checkpoint)
            scheduler = self.lr_scheduler
            scheduler.base_lrs = peaks
            shares = [share(scheduler.last_epoch) for share in scheduler.lr_lambdas]
            for group, own, peak, share in zip(self.optimizer.param_groups, settings, peaks, shares, strict=True):
                group.update({**own, "lr": peak * share})
            return loaded

    return OwnSettingsTrainer
