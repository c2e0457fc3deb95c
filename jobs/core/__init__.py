"""What everything else shares: errors, words, locations, instance types, queues, releases, records of runs. Pure."""
