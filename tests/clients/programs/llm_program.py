"""The `llm` command: a model of one's own, answers streamed and whole, a schema, a tool, a log of what was said."""

import json
import os
import subprocess
from pathlib import Path

from checks import check

MODEL = """\
# guide: yaml
- model_id: triblade
  model_name: smollm2-135m
  api_base: http://127.0.0.1:8000/v1
  supports_schema: true
  supports_tools: true
# end
"""
COMMAND = """\
# guide: bash
llm -m triblade -o temperature 0 "What is the capital of Japan?"
# end
"""


def said(command: str) -> str:
    """What a command line prints."""
    return subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, check=True).stdout


os.environ["LLM_USER_PATH"] = str(Path.cwd() / "llm")
Path("llm").mkdir()
Path("llm", "extra-openai-models.yaml").write_text(MODEL, encoding="utf-8")
answer = said(COMMAND)
check("an answer", "Tokyo" in answer)
check("the same, whole", said(COMMAND.replace("-m triblade", "-m triblade --no-stream")) == answer)
check("the log", json.loads(said("llm logs list --json -n 1"))[0]["response"].strip() == answer.strip())
formed = said(
    "llm -m triblade -o temperature 0 -o max_tokens 40 --schema 'capital, letters int' 'The capital of Japan?'"
)
check("a schema", set(json.loads(formed)) == {"capital", "letters"})
check("a conversation", said("llm -c -o temperature 0 -o max_tokens 4 'And France?'").strip())
