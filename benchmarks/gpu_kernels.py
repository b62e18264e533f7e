"""Time of every kernel of a decode step on one GPU: in CUDA graphs, over rotating copies of the weights, against the memory limit.

`--tune` tries many ways to cut each product; `--table` writes the best, which is where `ops/cuda/tilings_sm90.json` comes from.
Every product is compared with torch first. Run: python benchmarks/gpu_kernels.py [--tune] [--out FILE] [--table FILE].
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import Weights, random_matrix
from torch import Tensor

from triblade.engine.cuda_decoder import paged_layer
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.ops.cuda.attention import AttentionKernels, Rotation, Scoring, Sequences
from triblade.ops.cuda.device import CudaDevice
from triblade.ops.cuda.linear import STREAMED_TOKENS_DENSE, WIDE, Activations, LinearKernels
from triblade.ops.cuda.linear import Product as LinearProduct
from triblade.ops.cuda.packing import CHUNK, DENSE_BITS, TILE_ROWS, DeviceMatrix
from triblade.ops.cuda.tilings import Tiling, WideTiling, key_of, wide_tilings
from triblade.ops.cuda.vectors import VectorKernels

CACHE_BYTES = 256 * 2**20  # copies of a weight together: several times the second-level cache
LAUNCHES = 32  # in a graph
SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class Product:
    """A matrix product of a model."""

    name: str
    rows: int
    inputs: int
    is_gated: bool = False
    kind: Weights = "w4"


PRODUCTS = (
    Product("qkv", 4608, 3584),
    Product("output", 3584, 3584),
    Product("gate_up", 37888, 3584, True),
    Product("down", 3584, 18944),
    Product("head", 152064, 3584, False, "bf16"),
    Product("qkv bf16", 4608, 3584, False, "bf16"),
    Product("output bf16", 3584, 3584, False, "bf16"),
    Product("gate_up bf16", 37888, 3584, True, "bf16"),
    Product("down bf16", 3584, 18944, False, "bf16"),
)
TOKENS = (1, 16, 32, 64)  # one for each number of token tiles
LIBRARY_TOKENS = (64, 128)  # timed with the library as well, over rotating copies


def time_us(launch: Callable[[int], object], launches: int = LAUNCHES, rounds: int = 5) -> float:
    """Microseconds per call of `launch(number)`, from replays of a graph of many."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            launch(number)
    graph.replay()
    times: list[float] = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return float(statistics.median(times))


def candidates(matrix: DeviceMatrix, columns: int) -> Iterator[Tiling]:
    """Tilings to try: (tiles of rows, warps along rows, warps along inputs, depth, warps per multiprocessor, splits)."""
    dense = matrix.bits == DENSE_BITS
    tiles = -(-matrix.rows // TILE_ROWS)
    if columns <= 2:
        depths = (1, 2) if dense else (2, 4)
        grid = itertools.product((1, 2), (1,), (2, 4, 8, 16), depths, (16, 32, 40), (1,))
    else:
        grid = itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (2,), (8, 16), (1, 2, 4))
    for row_tiles, along_rows, along_inputs, depth, resident, splits in grid:
        warps = along_rows * along_inputs
        blocks = resident // warps
        shared = (along_inputs - 1) * along_rows * row_tiles * columns * 512 + 64
        sums = row_tiles * columns * (4 if dense or columns > 2 else 8)
        registers = 24 + sums + row_tiles * depth * (16 if dense else 5) + columns * 4
        units = matrix.inputs // max(CHUNK, matrix.group) // (along_inputs * splits)
        busy = tiles // (row_tiles * along_rows) * splits * warps
        if (
            shared > SHARED_BYTES
            or not 2 <= warps <= 16
            or blocks < 1
            or units < 2
            or resident * 32 * registers > 65536
        ):
            continue
        if busy < 132 * 4 or (splits > 1 and busy > 132 * 32):
            continue
        yield Tiling(row_tiles, columns, along_rows, along_inputs, depth, blocks, splits)


def wide_candidates(matrix: DeviceMatrix, columns: int) -> Iterator[WideTiling]:
    """The same for the warpgroups' instruction."""
    depths = (2,) if matrix.bits == DENSE_BITS else (2, 4, 8)
    for cut, depth in itertools.product(wide_tilings(matrix, columns), depths):
        blocks = -(-matrix.rows // (TILE_ROWS * cut.block_tiles)) * cut.splits
        if blocks >= 66 and (cut.splits == 1 or blocks <= 132 * 8) and depth * cut.groups <= 20:
            yield replace(cut, depth=depth)


def error(x: Tensor, matrix: DeviceMatrix, out: Tensor, dense: Tensor) -> float:
    """Relative, of a product without residual against float32."""
    expected = F.linear(x.float(), dense.float(), None if matrix.bias is None else matrix.bias.float())
    if matrix.is_gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    return float((out.float() - expected).norm() / expected.norm())


class Bench:
    """Kernels and inputs on the device."""

    def __init__(self) -> None:
        self.memory = torch.device("cuda")
        self.device = CudaDevice(self.memory)
        self.linear = LinearKernels(self.device, torch.bfloat16, self.memory)
        self.vectors = VectorKernels(self.device, torch.bfloat16, self.memory, 128)

    def products(self, *, tune: bool, chosen: Sequence[str], tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
        """A line per product and number of tokens."""
        for product in PRODUCTS:
            if chosen and product.name not in chosen:
                continue
            copies = [self.matrix(product)]
            while sum(m.nbytes for m in copies) < CACHE_BYTES:
                copies.append(self.matrix(product))
            self.linear.reserve(copies[:1])
            self.linear._partial = torch.empty(2**26, device=self.memory)
            for count in tokens:
                if product.kind != "bf16" or count <= STREAMED_TOKENS_DENSE:
                    yield self.product(product, copies, count, tune)
            if product.kind == "bf16":
                for count in LIBRARY_TOKENS:
                    yield self.library(product, copies, count)
            else:
                yield self.spelling_out(product, copies)

    def library(self, product: Product, copies: list[DeviceMatrix], tokens: int) -> dict[str, Any]:
        """cuBLAS over rotating copies."""
        x = torch.randn(tokens, product.inputs, device=self.memory).bfloat16()
        out = torch.empty(tokens, product.rows, device=self.memory, dtype=x.dtype)
        us = time_us(lambda n: torch.mm(x, copies[n % len(copies)].codes.T, out=out))
        print(f"{product.name:13} M={tokens:3} cuBLAS {us:7.2f} us {copies[0].nbytes / us / 1e6:5.2f} TB/s", flush=True)
        return {"product": product.name, "tokens": tokens, "cublas_us": us}

    def spelling_out(self, product: Product, copies: list[DeviceMatrix]) -> dict[str, Any]:
        """Packed weights as 16-bit ones."""
        us = time_us(lambda n: self.linear.dequantize(copies[n % len(copies)]))
        rate = (copies[0].nbytes + product.rows * product.inputs * 2) / us / 1e6
        print(f"{product.name:13} spelled out {us:7.2f} us {rate:5.2f} TB/s", flush=True)
        return {"product": product.name, "dequantize_us": us, "terabytes_per_s": rate}

    def matrix(self, product: Product) -> DeviceMatrix:
        """A random one."""
        return random_matrix(product.rows, product.inputs, product.kind, self.memory, is_gated=product.is_gated)

    def product(self, product: Product, copies: list[DeviceMatrix], tokens: int, tune: bool) -> dict[str, Any]:
        """The best tiling, or the one that is used."""
        first = copies[0]
        x = torch.randn(tokens, first.inputs, device=self.memory).bfloat16()
        inputs = self.linear.inputs(tokens, first.inputs)
        self.vectors.arrange(x, inputs)
        columns = first.rows // 2 if first.is_gated else first.rows
        is_head = product.name == "head"
        out = torch.full((tokens, columns), torch.nan, device=self.memory, dtype=torch.float32 if is_head else x.dtype)
        cuts, is_wide = inputs.tiles, bool(inputs.layout & WIDE)
        more = (wide_candidates if is_wide else candidates)(first, cuts) if tune else ()
        tilings = [self.linear.cut(first, inputs.layout), *more]
        self.device.compile((cut.source, self.linear.constants(first, cut, "silu")) for cut in tilings)
        dense = self.linear.dequantize(first).clone()
        found: list[tuple[float, Tiling | WideTiling]] = []
        worst = 0.0
        for cut in tilings:
            out.fill_(torch.nan)
            self.linear.stream(LinearProduct(inputs, first, out), cut)
            worst = max(worst, difference := error(x, first, out, dense))
            if not difference < 1e-2:
                print(f"WRONG {product.name} {tokens} {cut}: {difference}", flush=True)
                continue

            def launch(number: int, cut: Tiling | WideTiling = cut) -> None:
                self.linear.stream(LinearProduct(inputs, copies[number % len(copies)], out), cut)

            found.append((time_us(launch), cut))
        library = time_us(lambda _: torch.mm(x, dense.T), 16)
        used = found[0][0]
        found.sort(key=lambda pair: pair[0])
        best_us, best = found[0]
        line = {
            "product": product.name,
            "tokens": tokens,
            "key": key_of(first, cuts, is_wide=is_wide),
            "us": used,
            "best_us": best_us,
            "best": astuple(best),
            "others": [(round(us, 2), astuple(cut)) for us, cut in found[1:4]],
            "terabytes_per_s": first.nbytes / best_us / 1e6,
            "error": worst,
            "cublas_one_copy_us": library,
        }
        print(
            f"{product.name:13} M={tokens:3} used {used:7.2f} us, best {best_us:7.2f} us {line['terabytes_per_s']:5.2f} TB/s "
            f"{astuple(best)} error {worst:.1e} cuBLAS (cached) {library:.1f}",
            flush=True,
        )
        return line

    def attention(self, codec: str, context: int, count: int) -> dict[str, Any]:
        """Rotation with cache write, and attention, per layer of Qwen2-7B."""
        layout = KVLayout(num_layers=4, num_kv_heads=4, head_dim=128, block_size=16, codec=codec)
        width = layout.blocks_for(context)
        cache = KVCache(layout, width * count, torch.bfloat16, self.memory)
        for layer in range(4):
            everything = torch.arange(width * count * 16, device=self.memory)
            cache.write(layer, everything, *(torch.randn(len(everything), 4, 128, device=self.memory) for _ in "kv"))
        layers = [paged_layer(cache, index) for index in range(4)]
        kernels = AttentionKernels(self.device, torch.bfloat16, self.memory)
        tables = torch.randperm(width * count, device=self.memory).int().view(count, width)
        positions = torch.full((count,), context - 1, dtype=torch.int32, device=self.memory)
        slots = tables[:, -1] * 16 + (context - 1) % 16
        sequences = Sequences(positions=positions, slots=slots, tables=tables, queries=1)
        qkv = torch.randn(count, 36 * 128, device=self.memory).bfloat16()
        out = Activations(torch.empty(count, 28 * 128, device=self.memory, dtype=torch.bfloat16), count, 0)
        angle = torch.randn(context, 64, device=self.memory)
        rotation = Rotation(cosines=angle.cos(), sines=angle.sin(), norm=None, eps=1e-6)
        scoring = Scoring(scale=128**-0.5, softcap=None, window=None)
        kernels.attend(qkv, sequences, layers[0], scoring, out)
        queries = qkv.view(count, 36, 1, 128)[:, :28].float()
        k, v = (y[:, :context].float().transpose(1, 2) for y in cache.read(0, tables.long()))
        expected = F.scaled_dot_product_attention(queries, k, v, enable_gqa=True).flatten(1)
        error = float((out.values.float() - expected).norm() / expected.norm())
        turn = time_us(lambda n: kernels.rotate_and_write(qkv, sequences, layers[n % 4], rotation))
        attend = time_us(lambda n: kernels.attend(qkv, sequences, layers[n % 4], scoring, out))
        rate = count * context * layout.layer_bytes() / 16 / attend / 1e6
        print(
            f"attention {codec:8} ctx {context:5} B={count:3}: {attend:7.2f} us {rate:5.2f} TB/s, rotate+write {turn:5.2f} us, "
            f"error {error:.1e}",
            flush=True,
        )
        line = {"codec": codec, "context": context, "sequences": count, "attend_us": attend, "rotate_us": turn}
        return {**line, "terabytes_per_s": rate, "error": error}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="write the best tilings here")
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--no-attention", action="store_true")
    options = parser.parse_args()
    start = time.monotonic()
    bench = Bench()
    results: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    if not options.no_attention:
        grid = itertools.product(("bfloat16", "int8"), (576, 1024, 4096), (1, 8, 64))
        results["attention"] = [bench.attention(*sizes) for sizes in grid]
    results["products"] = []
    for line in bench.products(tune=options.tune, chosen=options.only, tokens=options.tokens):
        results["products"].append(line)
        results["seconds"] = time.monotonic() - start
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
        if options.table:
            options.table.write_text(json.dumps(table(results["products"]), indent=1, sort_keys=True))


def table(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best tiling of each product and number of token tiles, as `ops.cuda.linear` reads it."""
    return {line["key"]: line["best"] for line in lines if "best" in line}


if __name__ == "__main__":
    main()
