#!/usr/bin/env python3
"""What KV codecs on the wire cost and give: bytes, time, errors, perplexity and KL of decoding on rebuilt KV, and when each pays.

    python benchmarks/kv_codecs.py MODEL --calibrate TEXT --evaluate TEXT [--drift TEXT] [--moments FILE] [--output FILE.json]

Tables are made from the first text and measured on the others. From windows of the second text the first 1,024 tokens are sent from
a bfloat16 cache to the receiver's (bfloat16 for `raw`, int8 for the others), and 256 more are predicted from what arrived. Encoding
and decoding are timed in one thread, best of nine, on the same 1,024 tokens. Below its break-even bandwidth a codec makes transfers
faster: bytes saved / (its encoding and decoding - that of `raw`). The third text is traffic unlike the first: errors there with the
table as it is, and with one refreshed from samples of it. `--moments` keeps what was gathered for the next run.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from cpu_reference import cpu_name
from torch import Tensor

from triblade import __version__
from triblade.config import EngineConfig, KVCalibrateConfig
from triblade.kv.cache import KVCache
from triblade.kv.calibration import expected_errors, gather
from triblade.kv.calibration_collect import Taps
from triblade.kv.calibration_fit import FitOptions, analyse, refit_table, table_of
from triblade.kv.calibration_statistics import Moments
from triblade.kv.layout import KVLayout
from triblade.kv.wire import Int8Wire, RawWire, WireCodec
from triblade.kv.wire_frame import WireSpan
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_quality import CodecQuality, Route, measure_codecs
from triblade.kv.wire_rotation import rope_identity
from triblade.kv.wire_table import KVTable, TableModel
from triblade.models.decoder import Decoder
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_backend
from triblade.quant.calibration import load_calibration

PREFIX, REST = 1024, 256
LONG_PROMPT = 4096
ROUNDS = 9
PARTS = ("rows", "times", "drift")
FITS: Mapping[str, FitOptions] = {
    "pca-lut 1.5 bits": FitOptions(bits=1.5),
    "pca-lut 2.5 bits": FitOptions(bits=2.5),
    "pca-lut 4 bits": FitOptions(bits=4.0),
    "pca-lut 2.5 bits, plain variance": FitOptions(bits=2.5, use_metric=False),
    "pca-lut 95 % variance, 8 bits each": FitOptions(bits=8.0, variance=0.95, use_metric=False),
    "pca-lut 95 % variance, 2.5 bits": FitOptions(bits=2.5, variance=0.95, use_metric=False),
}
PRACTICE = {  # what the same idea is reported to give in practice
    "memory of the prefill side": "-62 %",
    "memory of the decode side's KV": "-53 %",
    "relative error": 1.2e-3,
    "relative error after drift, after a refresh": [2.1e-3, 1.1e-3],
}


def main() -> None:
    """Measure and write."""
    args = arguments()
    torch.set_num_threads(1)
    model = open_model(EngineConfig(model=args.model, dtype="float32", device="cpu"))
    softcap = model.config.attention_softcap is not None
    decoder = model.load(
        PREFIX + REST, select_backend("auto", deterministic=False, softcap=softcap)[0], torch.device("cpu")
    )
    moments = moments_of(args, model, decoder)
    tables = fitted(TableModel.of(layout_of(model)), moments)
    found: dict[str, Any] = {}
    if "rows" in args.parts:
        found |= rows(args, model, decoder, tables)
    if "times" in args.parts:
        found["times"] = times(args, model, decoder, tables)
    if "drift" in args.parts and args.drift:
        found["drift"] = drift(args, model, decoder, tables["pca-lut 2.5 bits"])
    write(args, found)


def fitted(model: TableModel, moments: Moments) -> dict[str, KVTable]:
    """A table for each of FITS."""
    found = {use_metric: analyse(moments, use_metric=use_metric) for use_metric in (True, False)}
    return {name: table_of(model, found[options.use_metric], options) for name, options in FITS.items()}


def rows(args: argparse.Namespace, model: OpenModel, decoder: Decoder, tables: Mapping[str, KVTable]) -> dict[str, Any]:
    """The table of codecs."""
    routes = routes_of(layout_of(model), tables)
    windows = windows_of(model, args.evaluate, args.windows)
    quality = measure_codecs(decoder, windows, PREFIX, routes)
    return {
        "perplexity, nothing sent": quality[""].perplexity,
        "rows": [row(name, routes[name], tables.get(name), quality[name]) for name in routes],
    }


def times(
    args: argparse.Namespace, model: OpenModel, decoder: Decoder, tables: Mapping[str, KVTable]
) -> dict[str, dict[str, float | None]]:
    """Encoding and decoding by codec, and the bandwidth below which a codec makes the transfer of 1,024 tokens faster."""
    routes = routes_of(layout_of(model), tables)
    window = windows_of(model, args.evaluate, 1)[0]
    found = {name: timed(decoder, window, route) for name, route in routes.items()}
    raw_s, _, raw_bytes = found["raw"]
    raw_s += found["raw"][1]
    return {
        name: {
            "encode ms per 1,000 tokens": round(encode_s / PREFIX * 1e6, 1),
            "decode ms per 1,000 tokens": round(decode_s / PREFIX * 1e6, 1),
            "break-even MB/s": None
            if name == "raw"
            else round((raw_bytes - size) / (encode_s + decode_s - raw_s) / 1e6, 1),
        }
        for name, (encode_s, decode_s, size) in found.items()
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name", help="of the model, in the result; default: the argument")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--evaluate", type=Path, required=True)
    parser.add_argument("--drift", type=Path)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--gradient-samples", type=int, default=24)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--moments", type=Path)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--gather-only", action="store_true")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def moments_of(args: argparse.Namespace, model: OpenModel, decoder: Decoder) -> Moments:
    """Gathered from the calibration text, or kept from before."""
    if args.moments and args.moments.exists():
        kept: Moments = torch.load(args.moments, weights_only=False)
        return kept
    moments = gathered(args, model, decoder, args.calibrate, args.samples)
    if args.moments:
        torch.save(moments, args.moments)
    if args.gather_only:
        raise SystemExit(0)
    return moments


def gathered(args: argparse.Namespace, model: OpenModel, decoder: Decoder, text: Path, samples: int) -> Moments:
    """As `triblade kv-calibrate` does."""
    config = KVCalibrateConfig(
        model=args.model, output=Path("unused"), text=(text,), samples=samples, gradient_samples=args.gradient_samples
    )
    if text == args.drift:
        config = replace(config, weighting="variance")  # traffic has no gradients
    return gather(decoder, load_calibration(text, model.tokenizer, sequences=samples).ids, config)


def routes_of(sender: KVLayout, tables: Mapping[str, KVTable]) -> dict[str, Route]:
    """All codecs that are compared."""
    receiver = replace(sender, codec="int8")
    routes = {"raw": Route(RawWire(sender), sender, sender), "int8": Route(Int8Wire(sender), sender, receiver)}
    return routes | {name: Route(PcaLutWire(sender, table, "int8"), sender, receiver) for name, table in tables.items()}


def layout_of(model: OpenModel) -> KVLayout:
    """Of the sender."""
    return KVLayout(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=16,
        codec="bfloat16",
        model_hash=model.checkpoint.fingerprint(),
        rope=rope_identity(model.config, PREFIX + REST),
    )


def windows_of(model: OpenModel, text: Path, count: int) -> list[Tensor]:
    """Windows [PREFIX + REST] from the beginning of a text."""
    length = PREFIX + REST
    characters = text.read_text(encoding="utf-8")[: count * length * 8]
    ids = torch.tensor(model.tokenizer.encode(characters, add_special_tokens=False))
    return list(ids[: count * length].view(count, length))


def timed(decoder: Decoder, window: Tensor, route: Route) -> tuple[float, float, int]:
    """Seconds to encode and to decode the prefix of a window, and bytes of the payload."""
    taps = Taps(decoder, PREFIX)
    with torch.inference_mode():
        decoder.forward(window[:PREFIX], torch.arange(PREFIX), taps)
    blocks, span = range(PREFIX // 16), WireSpan(0, PREFIX, PREFIX)
    sender, receiver = (KVCache(layout, len(blocks), torch.float32) for layout in (route.sender, route.receiver))
    for layer, (keys, values) in enumerate(taps.vectors()):
        sender.write(layer, torch.arange(PREFIX), keys, values)
    codec: WireCodec = route.codec
    payload = codec.encode(sender, blocks, span)
    encode_s = best(lambda: codec.encode(sender, blocks, span))
    return encode_s, best(lambda: codec.decode(receiver, blocks, span, payload)), len(payload)


def best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def row(name: str, route: Route, table: KVTable | None, quality: CodecQuality) -> dict[str, Any]:
    """One line of the table."""
    raw_bytes = route.sender.row_bytes / 16
    coded = quality.bytes_per_token if table is None else table.bits_per_token / 8
    exact = route.receiver.row_bytes / 16
    long = coded if table is None else coded + (exact - coded) * (table.exact_first + table.exact_last) / LONG_PROMPT
    keys, values = quality.relative_errors
    return {
        "codec": name,
        "bytes per token, 1,024 tokens": round(quality.bytes_per_token),
        "bytes per token, 4,096 tokens": round(long),
        "bytes per token that is not exact": round(coded),
        "ratio, 1,024 tokens": round(raw_bytes / quality.bytes_per_token, 2),
        "ratio, 4,096 tokens": round(raw_bytes / long, 2),
        "components": None if table is None else int((table.bits > 0).sum()),
        "error of keys": keys,
        "error of values": values,
        "perplexity": quality.perplexity,
        "KL nats per token": quality.kl_nats,
        "top-1 agreement": quality.top1_agreement,
    }


def drift(args: argparse.Namespace, model: OpenModel, decoder: Decoder, table: KVTable) -> dict[str, Any]:
    """Errors on text like that of the table, on other text, and there after a refresh."""
    usual = windows_of(model, args.evaluate, 2)
    fresh = refit_table(table, gathered(args, model, decoder, args.drift, 8))
    tokens = torch.tensor(model.tokenizer.encode(args.drift.read_text(encoding="utf-8"), add_special_tokens=False))
    length = PREFIX + REST
    others = list(tokens[-4 * length :].view(4, length))  # far behind what the refresh has seen
    sender = layout_of(model)
    receiver = replace(sender, codec="int8")
    routes = {
        "before": Route(PcaLutWire(sender, table, "int8"), sender, receiver),
        "refreshed": Route(PcaLutWire(sender, fresh, "int8"), sender, receiver),
    }
    quality = measure_codecs(decoder, others, PREFIX, routes)
    found: dict[str, Any] = {"usual text": asdict(expected_errors(decoder, table, usual))}
    for name, each in (("before", table), ("refreshed", fresh)):
        found[name] = asdict(expected_errors(decoder, each, others))
        found[name] |= {"KL nats per token": quality[name].kl_nats, "perplexity": quality[name].perplexity}
    return {**found, "raw perplexity": quality[""].perplexity}


def write(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Print, and put this model's figures beside those of others in the file."""
    for each in found.get("rows", ()):
        print(json.dumps(each))
    print(json.dumps({name: value for name, value in found.items() if name != "rows"}))
    if not args.output:
        return
    content = json.loads(args.output.read_text()) if args.output.exists() else {"models": {}}
    circumstances = {
        "what": (__doc__ or "").splitlines()[0],
        "hardware": f"{cpu_name()}, 1 thread",
        "versions": {"triblade": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "texts": {"calibrate": args.calibrate.name, "evaluate": args.evaluate.name, "windows": args.windows},
        "practice": PRACTICE,
    }
    name = args.name or args.model
    models = {**content["models"], name: {**content["models"].get(name, {}), **found}}
    args.output.write_text(json.dumps({**circumstances, "models": models}, indent=1) + "\n")


if __name__ == "__main__":
    main()
