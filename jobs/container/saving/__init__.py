"""From a Spot notice to a saved step and back: notice, stop, save, upload, manifest, resume."""
