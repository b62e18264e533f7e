"""Training an eagle head to the target as it is served, on text that the target writes."""
