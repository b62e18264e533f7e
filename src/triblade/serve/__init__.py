"""The OpenAI-compatible HTTP server in front of an `EngineClient`. `triblade.serve.run.serve` starts it."""
