"""From engine outputs to the JSON of the OpenAI API."""
