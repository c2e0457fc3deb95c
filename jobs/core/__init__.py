"""Shared by all packages of jobs: errors, words, locations, instance types, queues, images, records. Pure."""
