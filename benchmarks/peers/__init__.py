"""Engines that ours is compared with, each run in an environment of its own."""
