"""Shared by all other rooms: errors, words, locations, instance types, queues, images, records of runs. Pure."""
