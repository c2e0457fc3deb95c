"""Save a training before its instance goes away, and resume it on the next one.

From a Spot notice to a saved step and back, module by module:

1. `interruption` (launcher): polls for Spot notices, handles SIGTERM, and writes requests into the scratch folder.
2. `stop` (ranks): reads the request and agrees on one step for all ranks. After a notice they save, train on, and save
   again as late as the measured times allow. Without a notice, `interval` decides when to save.
3. `snapshot`: copies model and optimizer to host memory while the training waits, then writes them in the background.
4. `upload`: one thread on each node uploads the node's files; rank 0 waits for all nodes.
5. `manifest`: rank 0 writes `manifest.json` last, with the size and SHA-256 of each file. This declares the checkpoint
   complete: the next attempt ignores a folder without a manifest. Old checkpoints are pruned.
6. `resume`: the next attempt downloads the newest complete checkpoint, verifies it against its manifest, and restores
   what a Trainer does not restore itself.

`metrics` keeps metrics.jsonl and TensorBoard's events continuous across attempts.

Scripts that do not use the library save by themselves. `script_complete` decides which of their checkpoints are
complete, `script_checkpoints` uploads and restores them, and `saved_folder` does the same for their output.
"""
