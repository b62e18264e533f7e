"""Prefill and decode in different workers: what they say to each other, the ways it travels, and who is asked for what."""
