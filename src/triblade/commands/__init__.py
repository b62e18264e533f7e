"""The commands of `triblade`, each registered with the application of `frame` when its module is imported."""
