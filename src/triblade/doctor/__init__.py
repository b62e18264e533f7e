"""From a symptom to its cause and what to do: of a server that runs, by asking it, and of one that does not run yet."""
