"""lm-evaluation-harness: multiple choice by log-probabilities, and a perplexity that must be that of `triblade eval`.

The harness scores a page behind one token that begins texts and, up to its maximal length, in one piece. `triblade eval` cuts a
text into windows and scores all of a window but its first token. So the text for it is the pages with that token before
each, every page one token shorter than a window; then both predict the same tokens from the same ones before them.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import requests

from checks import check, measured

SERVER = "http://127.0.0.1:8000"
COMMAND = """\
# guide: bash
SERVER=base_url=http://127.0.0.1:8000/v1/completions,model=smollm2-135m,max_length=1024
lm_eval --model local-completions --model_args $SERVER --tasks capitals,pages --include_path . --output_path results
# end
"""
QUESTIONS = [("France", 0), ("Italy", 1), ("Spain", 2), ("Japan", 3)]
WINDOW, PAGES = 256, 2  # tokens, pages of one token less


def ask(route: str, **body: object) -> dict:
    """An answer of the server's tokenizer."""
    answer = requests.post(f"{SERVER}/{route}", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def pages_of(text: str) -> list[str]:
    """Pieces of a text that are WINDOW - 1 tokens each, also when they are tokenized alone."""
    ids = ask("tokenize", prompt=text, add_special_tokens=False)["tokens"]
    pages, length = [], WINDOW - 1
    for begin in range(0, len(ids) - length, length):
        page = ask("detokenize", tokens=ids[begin : begin + length])["prompt"]
        if ask("tokenize", prompt=page, add_special_tokens=False)["tokens"] == ids[begin : begin + length]:
            pages.append(page)
    return pages[:PAGES]


def write_lines(name: str, rows: list[dict[str, object]]) -> None:
    """A data set of the harness."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def own_perplexity(pages: list[str]) -> dict[str, float]:
    """What `triblade eval` says about the same pages."""
    named = requests.get(f"{SERVER}/tokenizer_info", timeout=60).json()
    first = named["bos_token"] or named["eos_token"]
    Path("pages.txt").write_text("".join(first + page for page in pages), encoding="utf-8")
    command = [os.environ["TRIBLADE_PYTHON"], "-m", "triblade", "eval", os.environ["TRIBLADE_MODEL"]]
    command += ["--text", "pages.txt", "--context", str(WINDOW), "--dtype", "float32", "--threads", "1", "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


pages = pages_of(Path("architecture.md").read_text(encoding="utf-8"))
write_lines("capitals.jsonl", [{"country": country, "label": label} for country, label in QUESTIONS])
write_lines("pages.jsonl", [{"page": page} for page in pages])
subprocess.run(COMMAND, shell=True, check=True)
(found,) = Path("results").rglob("results_*.json")
results = json.loads(found.read_text(encoding="utf-8"))["results"]
check("multiple choice", results["capitals"]["acc,none"] == 1)

tokens, length = PAGES * (WINDOW - 1), sum(len(page.encode()) for page in pages)
theirs, ours = results["pages"]["byte_perplexity,none"] ** (length / tokens), own_perplexity(pages)
measured(f"perplexity {theirs:.5f} through the server, {ours['perplexity']:.5f} by `triblade eval`")
check("as many tokens", ours["num_tokens"] == tokens == 510)
check("the perplexity of triblade eval, to four digits", math.isclose(theirs, ours["perplexity"], rel_tol=5e-5))
