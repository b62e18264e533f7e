"""triblade makes open-weight LLMs fast on the hardware people have."""

__version__ = "0.1.0"
