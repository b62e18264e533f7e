"""Schemathesis: requests made from the OpenAPI document, allowed and forbidden ones; the answers must be as it says."""

import json
import os
import subprocess
import urllib.request
from pathlib import Path

from checks import check

COMMAND = """\
# guide: bash
schemathesis run http://127.0.0.1:8000/openapi.json --checks not_a_server_error,response_schema_conformance
# end
"""
# Answers of two tokens: what is generated is a request, not a text.
SHORT_ANSWERS = """\
import schemathesis

WITH_TEXT = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@schemathesis.hook
def before_call(context, case, kwargs):
    if isinstance(case.body, dict):
        limit = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
        if case.path in WITH_TEXT and case.body.get(limit) is None:
            case.body = {**case.body, limit: 2}
"""
MORE = ",status_code_conformance,content_type_conformance --max-examples 3 --seed 1"
DOCUMENT = "http://127.0.0.1:8000/openapi.json"

Path("hooks.py").write_text(SHORT_ANSWERS, encoding="utf-8")
os.environ["SCHEMATHESIS_HOOKS"] = "hooks"
command = COMMAND.replace("conformance\n", f"conformance{MORE}\n")
done = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, check=False)
print(done.stdout)
with urllib.request.urlopen(DOCUMENT) as answer:
    count = sum(len(methods) for methods in json.load(answer)["paths"].values())
check("nothing is wrong", done.returncode == 0)
check("every operation was tried", f" {count} selected / {count} total" in done.stdout)
