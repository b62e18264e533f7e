"""The cost model of `triblade plan` against what was measured: steps, prompts and memory, on one H200 and on two CPU cores.

Run: python benchmarks/plan_errors.py [--tuned FOLDER ...] [--output FILE]. Reads benchmarks/results; computes, measures nothing.
The rates of `tune/kernels.toml` were fitted to the same measurements, so these are errors of the fit, not of predictions for
something new. With folders of `triblade tune` it adds whole plans that were served: those are predictions, made before each trial.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from triblade.config import Workload
from triblade.models.config import ModelConfig, model_config
from triblade.tune.cost import StepCost, Weights
from triblade.tune.hardware import Hardware, find_hardware, kernels_of
from triblade.tune.points import LONGEST_DRAFT
from triblade.tune.serving import Candidate, expected_tokens

RESULTS = Path(__file__).parent / "results"
CHAT_CONTEXT = 164  # of a chat question in the middle of its answer, about
GPU_CHUNK = 8192  # tokens per step in the GPU runs
BITS = {"w4": 4, "bf16": 16}
# Layers, hidden, feed-forward, heads, KV heads, head size, vocabulary, tied: as in benchmarks/gpu_models.py.
SHAPES = {
    "qwen2-7b": (28, 3584, 18944, 28, 4, 128, 152064, False),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936, True),
    "llama-3-8b": (32, 4096, 14336, 32, 8, 128, 128256, False),
    "smollm2-135m": (30, 576, 1536, 9, 3, 64, 49152, True),
}


@dataclass(frozen=True)
class Row:
    """A measurement and its prediction."""

    what: str
    kind: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def shape(name: str) -> ModelConfig:
    """A model by the name that results have for it."""
    layers, hidden, inner, heads, kv_heads, size, vocabulary, tied = SHAPES[name]
    return model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": size,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 8192,
        }
    )


def gpu_rows() -> Iterator[Row]:
    """Decoding and single prompts of the first runs; the second one had other kernels that were given up."""
    h200 = find_hardware("h200")
    runs = json.loads((RESULTS / "gpu-h200.json").read_text())["engine"]
    runs += json.loads((RESULTS / "gpu-h200-wide.json").read_text())["engine"]["first"]
    for run in runs:
        weights = Weights(scheme=run["weights"], bits=BITS[run["weights"]])
        cost = StepCost(shape(run["model"]), h200, kernels_of(h200), weights, run["codec"])
        name = f"{run['model']} {run['weights']}, KV {run['codec']}, {run['batch']} x {run['prompt']}"
        if "ms_per_token" in run:
            predicted = cost.decode_s(run["batch"], run["prompt"] + run["new"] / 2) * 1e3
            yield Row(f"{name}, ms per token", "GPU decode", predicted, run["ms_per_token"])
        if run["batch"] == 1 and "first_s" in run:
            predicted = cost.prefill_s(run["prompt"], 0, GPU_CHUNK) * 1e3
            yield Row(f"{name}, ms to the first token", "GPU prompt", predicted, run["first_s"] * 1e3)


def cpu_rows() -> Iterator[Row]:
    """Decoding, a prompt and a verified draft; bandwidth and rate are those that the limit probe had in the same run."""
    found: dict[str, list[float]] = json.loads((RESULTS / "cpu-native.json").read_text())["all"]
    median = {name: statistics.median(values) for name, values in found.items() if isinstance(values, list)}
    here = cpu(median)
    for codec, title in (("bfloat16", "triblade"), ("int8", "int8 KV")):
        cost = StepCost(
            shape("smollm2-135m"), here, kernels_of(here), Weights(scheme="int4", bits=4, table_bits=8), codec
        )
        for name, value in median.items():
            if name.startswith(f"{title} ms "):
                batch, context = map(int, name.split()[-1].split("x"))
                yield Row(f"CPU {name}", "CPU decode", cost.decode_s(batch, context + 32) * 1e3, value)
        if codec == "bfloat16":
            yield Row("CPU chunk 5, ms", "CPU draft", cost.decode_s(1, 128, 5) * 1e3, median["triblade chunk 5"])
            measured = 512 / median["triblade prefill 512"] * 1e3
            yield Row("CPU prefill 512, ms", "CPU prompt", cost.prefill_s(512, 0, 512) * 1e3, measured)
            yield Row("CPU weights, MiB", "memory", cost.weight_bytes / 2**20, median["memory weights"])
        kv_name = "memory kv" if codec == "bfloat16" else "memory int8 kv"
        yield Row(f"CPU {kv_name}, MiB", "memory", 16384 * cost.kv_token_bytes / 2**20, median[kv_name])


def speculation_rows() -> Iterator[Row]:
    """Decoding with an eagle head on chat, times plain decoding of the same run; guesses as many as pay, right as in the tables."""
    found: dict[str, list[float]] = json.loads((RESULTS / "cpu-native.json").read_text())["all"]
    here = cpu({name: statistics.median(values) for name, values in found.items() if isinstance(values, list)})
    cost = StepCost(
        shape("smollm2-135m"), here, kernels_of(here), Weights(scheme="stored", bits=4, table_bits=8), "bfloat16"
    )
    for run in json.loads((RESULTS / "speculation.json").read_text())["rows"]:
        if (run["drafter"], run["workload"]) == ("eagle", "chat"):
            predicted = max(gain(cost, run["batch"], length) for length in range(LONGEST_DRAFT + 1))
            name = f"CPU eagle, {run['batch']} requests, times plain"
            yield Row(name, "CPU speculation", predicted, run["ratio"]["decode"])


def gain(cost: StepCost, batch: int, length: int) -> float:
    """Of so many guesses on chat, times plain decoding."""
    chat = Workload(name="chat", prompt_tokens=100, output_tokens=128, concurrency=batch)
    candidate = Candidate(weights=cost.weights, drafter="eagle" if length else None, draft_length=length)
    tokens, rows, drafting = expected_tokens(candidate, chat)
    plain_s = cost.decode_s(batch, CHAT_CONTEXT)
    return tokens * plain_s / (cost.decode_s(batch, CHAT_CONTEXT, rows) + drafting * plain_s)


def served_rows(folder: Path) -> Iterator[Row]:
    """Plans that `triblade tune` served and measured."""
    labels = {"e2el_ms": "time of a request, ms", "output_tokens_per_s": "tokens/s", "tpot_ms": "ms per token"}
    labels["memory_mib"] = "memory, MiB"
    for trial in json.loads((folder / "trials.json").read_text(encoding="utf-8")):
        runs = [] if trial["measurement"] is None else trial["measurement"]["runs"]
        for name, label in labels.items() if runs else ():
            measured = statistics.fmean(run[name] for run in runs)
            point = trial["point"]
            what = f"{point['weights']} {point['drafter']} {point['draft_length']} {point['placement']}, {label}"
            yield Row(f"{folder.name} {trial['number']}: {what}", f"served {label}", trial["predicted"][name], measured)


def cpu(median: dict[str, float]) -> Hardware:
    """Two cores as the limit probe of that run saw them: 0.269 GOP a token."""
    operations = 2 * (shape("smollm2-135m").num_parameters) * median["limit int8_head 16"]
    return replace(
        find_hardware("cpu-desktop"),
        cores=2,
        bandwidth_gb_s=median["limit bandwidth_gb_s"],
        int8=operations / 1e12 * 1.2,  # the probe reads weights meanwhile; products in the caches are a fifth faster
        float16=operations / 1e12 / 3,  # what `tune.profile` finds here of products with 16-bit weights
        label="measured",
    )


def main() -> None:
    """Print every row, then medians by kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tuned", type=Path, nargs="*", default=[], help="folders of `triblade tune`")
    options = parser.parse_args()
    output: Path | None = options.output
    rows = [*gpu_rows(), *cpu_rows(), *speculation_rows()]
    rows += [row for folder in options.tuned for row in served_rows(folder)]
    for row in rows:
        print(f"{row.what:58} {row.predicted:9.2f} {row.measured:9.2f} {row.error:+7.1%}")
    kinds = {kind: [abs(row.error) for row in rows if row.kind == kind] for kind in dict.fromkeys(r.kind for r in rows)}
    medians = {
        kind: {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}
        for kind, errors in kinds.items()
    }
    for kind, numbers in medians.items():
        print(f"{kind}: median {numbers['median']:.1%}, worst {numbers['worst']:.1%} of {numbers['rows']}")
    if output is not None:
        record: dict[str, Any] = {"what": " ".join((__doc__ or "").split()), "errors": medians}
        record["rows"] = [{**asdict(row), "error": round(row.error, 4)} for row in rows]
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
