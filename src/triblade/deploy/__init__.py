"""A Plan on another engine: translated, checked against that engine, written for a cluster or run."""
