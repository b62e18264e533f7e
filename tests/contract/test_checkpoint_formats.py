"""Every checkpoint format: what it writes it reads again, bit by bit, and what it cannot hold or read it refuses by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantized import DictionaryStore, random_matrix, same, store_of

from triblade.errors import CheckpointError, UnsupportedError
from triblade.quant.formats.base import CheckpointFormat
from triblade.quant.formats.bit_packing import pack
from triblade.quant.scheme import QuantScheme
from triblade.registry import CHECKPOINT_FORMATS

NAME = "model.layers.0.mlp.down_proj"
SCHEMES = [
    QuantScheme(bits=bits, group_size=group, symmetric=symmetric)
    for bits in (2, 3, 4, 8)
    for group in (32, 64, 96, None)
    for symmetric in (True, False)
]
SCHEMES += [QuantScheme(bits=8, group_size=None, symmetric=symmetric, activation_bits=8) for symmetric in (True, False)]
SIZES = [(1, 192), (5, 192), (40, 192), (64, 576), (96, 1536)]


@pytest.fixture(params=list(CHECKPOINT_FORMATS))
def layout(request: pytest.FixtureRequest) -> CheckpointFormat:
    made: CheckpointFormat = CHECKPOINT_FORMATS[request.param]()
    return made


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)  # B13, B15, B16, A26
def test_what_is_written_is_read(layout: CheckpointFormat, scheme: QuantScheme) -> None:
    """All sizes that the format takes, odd ones too; those it does not take it names."""
    for seed, (rows, inputs) in enumerate(SIZES):
        if scheme.group_size is not None and inputs % scheme.group_size:
            continue
        reason = layout.why_not(scheme, rows, inputs)
        if reason is not None:
            assert layout.name.upper() in reason
            continue
        matrix = random_matrix(rows, inputs, scheme, layout.scale_dtype(torch.bfloat16), seed)
        store, config = store_of(layout, {NAME: matrix})
        (module,) = layout.modules(store, config).values()
        assert (module.name, module.rows, module.inputs) == (NAME, rows, inputs)
        assert module.tensors == store.names()
        read = layout.read(store, module)
        assert read.input_order is None
        assert same(read.matrix, matrix)
        assert torch.equal(read.dequantize(), matrix.dequantize())


def test_every_format_takes_what_people_use(layout: CheckpointFormat) -> None:
    """4 bits in groups on the sizes of SmolLM2, and a row of one group."""
    for group in (32, 64, 128, None):
        for symmetric in (True, False):
            scheme = QuantScheme(bits=4, group_size=group, symmetric=symmetric)
            assert layout.why_not(scheme, 576, 1536) is None


BREAKAGES = {
    "a missing scale": lambda tensors: tensors.pop(next(n for n in tensors if "scale" in n)),
    "a missing zero point": lambda tensors: tensors.pop(next(n for n in tensors if "zero" in n)),
    "a scale too many": lambda tensors: tensors.update(
        {n: torch.cat((t, t), 1 if "weight" in n else 0) for n, t in tensors.items() if "scale" in n}
    ),
    "scales that are no floats": lambda tensors: tensors.update(
        {n: t.to(torch.int8) for n, t in tensors.items() if "scale" in n}
    ),
    "codes of another type": lambda tensors: tensors.update(
        {n: t.long() for n, t in tensors.items() if n.endswith(("qweight", "weight_packed"))}
    ),
    "zero points of another shape": lambda tensors: tensors.update(
        {n: torch.cat((t, t)) for n, t in tensors.items() if "zero" in n}
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_modules_are_named(layout: CheckpointFormat, breakage: str) -> None:
    scheme = QuantScheme(bits=4, group_size=64, symmetric=False)
    store, config = store_of(layout, {NAME: random_matrix(64, 192, scheme)})
    layout.modules(store, config)
    BREAKAGES[breakage](store.tensors)
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj"):
        layout.modules(store, config)


def test_a_group_that_does_not_divide_is_named(layout: CheckpointFormat) -> None:  # B11
    scheme = QuantScheme(bits=4, group_size=64, symmetric=True)
    store, config = store_of(layout, {NAME: random_matrix(64, 192, scheme)})
    text = copy.deepcopy(config)
    for settings in (text, *(group["weights"] for group in text.get("config_groups", {}).values())):
        if "group_size" in settings:
            settings["group_size"] = 128
    with pytest.raises(CheckpointError, match=r"down_proj: 192 inputs are not divisible by the group size 128"):
        layout.modules(store, text)


# ---- compressed-tensors


def weights(**settings: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, **settings}


def compressed(group: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights(), **group}},
        **settings,
    }


REFUSED_CONFIGS = {
    "fp8": (compressed({}, format="float-quantized"), "format"),
    "nvfp4": (compressed({}, format="nvfp4-pack-quantized"), "format"),
    "marlin": (compressed({}, format="marlin-24"), "format"),
    "fp8 in a group": (compressed({"format": "float-quantized"}), "group_0.format"),
    "float weights": (compressed({"weights": weights(type="float")}), "type"),
    "rotations": (compressed({}, transform_config={"config_groups": {"R1": {}}}), "rotated"),
    "sparsity": (compressed({}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity"),
    "blocks": (compressed({"weights": weights(strategy="block")}), "strategy"),
    "dynamic weights": (compressed({"weights": weights(dynamic=True)}), "dynamic"),
    "an unknown argument": (compressed({"weights": weights(offset=3)}), "offset"),
    "an unknown key of a group": (compressed({"bias": 1}), "bias"),
    "outputs": (compressed({"output_activations": weights()}), "outputs"),
    "static inputs": (
        compressed({"input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}}),
        "input_activations",
    ),
    "5 bits": (compressed({"weights": weights(num_bits=5)}), "5 bits"),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_compressed_tensors_refuses_what_it_would_misread(case: str) -> None:
    config, reason = REFUSED_CONFIGS[case]
    with pytest.raises(UnsupportedError, match=reason):
        CHECKPOINT_FORMATS["compressed-tensors"]().modules(DictionaryStore(), config)


def test_compressed_tensors_takes_what_older_and_newer_writers_add() -> None:
    """Nulls of 0.17, moe_sparsity_config of 0.20, static act-order, status of old tools."""
    nulls = dict.fromkeys(("observer_kwargs", "block_structure", "scale_dtype", "zp_dtype"))
    group = {
        "weights": weights(observer="mse", actorder="static", dynamic=False, **nulls),
        "input_activations": None,
        "output_activations": None,
    }
    config = compressed(group, quantization_status="frozen", sparsity_config={}, transform_config={}, version="0.17")
    assert CHECKPOINT_FORMATS["compressed-tensors"]().modules(DictionaryStore(), config) == {}


def test_the_padded_words_of_three_bits_are_read() -> None:  # B15
    """A row of 32 codes as compressed-tensors 0.17 wrote it: four words in place of three."""
    layout = CHECKPOINT_FORMATS["compressed-tensors"]()
    golden = torch.tensor([0x08FAC688, 0x1A23EB1A, 0x2C688FAC, 0x0000003E], dtype=torch.int32)
    store = DictionaryStore(
        {
            f"{NAME}.weight_packed": golden.repeat(11, 1),
            f"{NAME}.weight_scale": torch.ones(11, 1, dtype=torch.bfloat16),
            f"{NAME}.weight_shape": torch.tensor([11, 32]),
            # Zero points 0, 1, 2 ... of 11 rows: ten in the first word, one in the second.
            f"{NAME}.weight_zero_point": torch.tensor([[0x08FAC688], [2]], dtype=torch.int32),
        }
    )
    config = compressed({"weights": weights(num_bits=3, group_size=32, symmetric=False)})
    (module,) = layout.modules(store, config).values()
    matrix = layout.read(store, module).matrix
    assert matrix.codes.tolist() == [[i % 8 for i in range(32)]] * 11
    assert matrix.zero_points is not None
    assert matrix.zero_points.flatten().tolist() == [i % 8 for i in range(11)]


def test_a_width_that_is_neither_is_refused() -> None:
    layout = CHECKPOINT_FORMATS["compressed-tensors"]()
    scheme = QuantScheme(bits=3, group_size=64, symmetric=True)
    store, config = store_of(layout, {NAME: random_matrix(8, 192, scheme)})
    store.tensors[f"{NAME}.weight_packed"] = torch.zeros(8, 24, dtype=torch.int32)  # 4 bits
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_packed of 192 inputs and 3 bits"):
        layout.modules(store, config)


def test_mixed_precision_in_one_checkpoint() -> None:  # B25
    """Two widths and whole-byte weights under rounded inputs; each module gets its own scheme back."""
    layout = CHECKPOINT_FORMATS["compressed-tensors"]()
    schemes = {
        "model.layers.0.self_attn.q_proj": QuantScheme(bits=8, group_size=64, symmetric=True),
        "model.layers.0.mlp.down_proj": QuantScheme(bits=4, group_size=32, symmetric=False),
        "model.layers.10.mlp.down_proj": QuantScheme(bits=8, group_size=None, symmetric=True, activation_bits=8),
    }
    matrices = {name: random_matrix(64, 192, scheme, seed=seed) for seed, (name, scheme) in enumerate(schemes.items())}
    store, config = store_of(layout, matrices)
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["lm_head"]
    modules = layout.modules(store, config)
    assert {name: module.scheme for name, module in modules.items()} == schemes
    assert all(same(layout.read(store, module).matrix, matrices[name]) for name, module in modules.items())


def test_names_win_over_patterns_and_classes() -> None:
    four, eight = weights(), weights(num_bits=8)
    groups = {
        "group_0": {"targets": ["Linear"], "weights": four},
        "group_1": {"targets": [r"re:.*layers\.1\..*"], "weights": eight},
    }
    layout = CHECKPOINT_FORMATS["compressed-tensors"]()
    names = [f"model.layers.{index}.mlp.up_proj" for index in (0, 1, 10)]
    bits = (4, 8, 4)
    schemes = [QuantScheme(bits=width, group_size=64, symmetric=True) for width in bits]
    store, _ = store_of(layout, {n: random_matrix(8, 64, s) for n, s in zip(names, schemes, strict=True)})
    modules = layout.modules(store, {**compressed({}), "config_groups": groups})
    assert tuple(modules[name].scheme.bits for name in names) == bits
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj is stored quantized"):
        layout.modules(store, {**compressed({}), "config_groups": groups, "ignore": [r"re:.*layers\.0"]})


def test_one_scale_for_a_whole_matrix() -> None:
    layout = CHECKPOINT_FORMATS["compressed-tensors"]()
    tensors = {
        f"{NAME}.weight": torch.tensor([[-128, 127, 3]], dtype=torch.int8),
        f"{NAME}.weight_scale": torch.tensor([0.5]),
    }
    config = compressed({"weights": weights(num_bits=8, strategy="tensor", group_size=None)}, format="int-quantized")
    store = DictionaryStore(tensors)
    (module,) = layout.modules(store, config).values()
    assert layout.read(store, module).dequantize().tolist() == [[-64.0, 63.5, 1.5]]


# ---- AWQ


def test_awq_words_and_zero_points_are_those_of_the_format() -> None:  # A26
    """Output columns valued 0 to 7 make the golden word; a symmetric matrix has 8 for every zero point."""
    layout = CHECKPOINT_FORMATS["awq"]()
    matrix = random_matrix(8, 32, QuantScheme(bits=4, group_size=32, symmetric=True))
    matrix.codes[:] = torch.arange(8, dtype=torch.uint8)[:, None]
    tensors = layout.tensors(matrix)
    assert tensors["qweight"].tolist() == [[0x75316420]] * 32
    assert tensors["qzeros"].view(torch.uint32).tolist() == [[0x88888888]]
    assert tensors["scales"].shape == (1, 8)


@pytest.mark.parametrize(
    "settings",
    [{"version": "gemv"}, {"version": "GEMV_FAST"}, {"version": "marlin"}, {"backend": "llm-awq"}, {"bits": 8}],
    ids=str,
)
def test_awq_refuses_other_layouts(settings: dict[str, Any]) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM", **settings}
    with pytest.raises(UnsupportedError, match=next(iter(settings))):
        CHECKPOINT_FORMATS["awq"]().modules(DictionaryStore(), config)


# ---- GPTQ


def gptq_store(scheme: QuantScheme, zero_word: int, group_index: torch.Tensor | None = None) -> DictionaryStore:
    matrix = random_matrix(32, 192, scheme)
    store, _ = store_of(CHECKPOINT_FORMATS["gptq"](), {NAME: matrix})
    words = torch.full_like(store.tensors[f"{NAME}.qzeros"].long(), zero_word).to(torch.uint32).view(torch.int32)
    store.tensors[f"{NAME}.qzeros"] = words
    if group_index is not None:
        store.tensors[f"{NAME}.g_idx"] = group_index.int()
    return store


def gptq_config(scheme: QuantScheme, **settings: Any) -> dict[str, Any]:
    group = scheme.group_size or -1
    return {"quant_method": "gptq", "bits": scheme.bits, "group_size": group, "sym": scheme.symmetric, **settings}


ZERO_WORDS = {2: (0x55555555, 0xAAAAAAAA), 4: (0x77777777, 0x88888888), 8: (0x7F7F7F7F, 0x80808080)}


@pytest.mark.parametrize("bits", ZERO_WORDS)
@pytest.mark.parametrize("stated", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", [0, 1])
def test_symmetric_codes_are_right_whatever_version_is_stated(  # A25
    bits: int, stated: str, stored: int, caplog: pytest.LogCaptureFixture
) -> None:
    layout, scheme = CHECKPOINT_FORMATS["gptq"](), QuantScheme(bits=bits, group_size=64, symmetric=True)
    store = gptq_store(scheme, ZERO_WORDS[bits][stored])
    (module,) = layout.modules(store, gptq_config(scheme, checkpoint_format=stated)).values()
    assert same(layout.read(store, module).matrix, random_matrix(32, 192, scheme))
    assert ("the configuration says" in caplog.text) == (stated != ("gptq", "gptq_v2")[stored])


def test_symmetric_zero_points_of_three_bits() -> None:  # A25
    """Each field of version 1 is 3."""
    layout = CHECKPOINT_FORMATS["gptq"]()
    matrix = random_matrix(32, 192, QuantScheme(bits=3, group_size=64, symmetric=True))
    words = layout.tensors(matrix)["qzeros"]
    assert words.view(torch.uint32).tolist() == [[0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]] * 3


def test_symmetric_with_other_zero_points_is_a_contradiction() -> None:  # A25
    layout, scheme = CHECKPOINT_FORMATS["gptq"](), QuantScheme(bits=4, group_size=64, symmetric=True)
    store = gptq_store(scheme, 0x77787777)
    (module,) = layout.modules(store, gptq_config(scheme)).values()
    with pytest.raises(CheckpointError, match=r"down_proj is symmetric .* zero points other than 8"):
        layout.read(store, module)


@pytest.mark.parametrize(("version", "word", "zero"), [("gptq", 0x77777777, 8), ("gptq_v2", 0x77777777, 7)])
def test_zero_points_of_their_own_follow_the_version(version: str, word: int, zero: int) -> None:  # A25
    layout, scheme = CHECKPOINT_FORMATS["gptq"](), QuantScheme(bits=4, group_size=64, symmetric=False)
    store = gptq_store(scheme, word)
    (module,) = layout.modules(store, gptq_config(scheme, checkpoint_format=version)).values()
    zeros = layout.read(store, module).matrix.zero_points
    assert zeros is not None
    assert (zeros == zero).all()


@pytest.mark.parametrize("maker", ["gptqmodel:7.7.0", "optimum:1.2"])
def test_a_zero_point_of_0_in_version_1_is_read_as_its_writer_meant_it(maker: str) -> None:  # A25, A26
    """One is subtracted from whole words, which borrows from the next code, or from code after code, which wraps."""
    layout, scheme = CHECKPOINT_FORMATS["gptq"](), QuantScheme(bits=4, group_size=64, symmetric=False)
    store = gptq_store(scheme, 0)
    zeros = torch.full((3, 32), 7, dtype=torch.uint8)
    zeros[:, 1] = 0
    one_by_one = pack((zeros.int() - 1 & 15).to(torch.uint8), 4)
    by_words = (pack(zeros, 4).long() - 0x11111111 & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    assert not torch.equal(one_by_one, by_words)
    store.tensors[f"{NAME}.qzeros"] = by_words if "gptqmodel" in maker else one_by_one
    config = gptq_config(scheme, checkpoint_format="gptq", meta={"quantizer": [maker]})
    (module,) = layout.modules(store, config).values()
    read = layout.read(store, module).matrix.zero_points
    assert read is not None
    assert torch.equal(read, zeros.T)


def test_zero_points_of_their_own_are_written_as_version_2() -> None:
    layout = CHECKPOINT_FORMATS["gptq"]()
    for symmetric, version in ((True, "gptq"), (False, "gptq_v2")):
        scheme = QuantScheme(bits=4, group_size=64, symmetric=symmetric)
        assert layout.quantization_config({NAME: scheme}, [])["checkpoint_format"] == version


def test_a_version_that_is_not_stated_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    layout, scheme = CHECKPOINT_FORMATS["gptq"](), QuantScheme(bits=4, group_size=64, symmetric=False)
    layout.modules(gptq_store(scheme, 0x77777777), gptq_config(scheme))
    assert "does not say its version" in caplog.text


def test_gptq_words_are_those_of_the_format() -> None:
    """Input rows 0 to 7 valued 0 to 7."""
    matrix = random_matrix(32, 32, QuantScheme(bits=4, group_size=32, symmetric=True))
    matrix.codes[:] = torch.arange(32, dtype=torch.uint8) % 8
    tensors = CHECKPOINT_FORMATS["gptq"]().tensors(matrix)
    assert tensors["qweight"].tolist() == [[0x76543210] * 32] * 4
    assert tensors["qzeros"].tolist() == [[0x77777777] * 4]
    assert tensors["g_idx"].tolist() == [0] * 32


def test_scattered_groups_are_put_back_in_place() -> None:
    """Act-order: input k has the scale of group g_idx[k]; computed here element by element."""
    layout, scheme = CHECKPOINT_FORMATS["gptq"](), QuantScheme(bits=4, group_size=64, symmetric=True)
    index = (torch.arange(192) // 64)[torch.randperm(192, generator=torch.Generator().manual_seed(0))]
    store = gptq_store(scheme, 0x77777777, index)
    (module,) = layout.modules(store, gptq_config(scheme, desc_act=True)).values()
    read = layout.read(store, module)
    stored = random_matrix(32, 192, scheme)  # its codes are in the order of the inputs
    expected = (stored.codes.float() - 8) * stored.scales.float()[:, index]
    assert torch.equal(read.dequantize(), expected)
    assert read.input_order is not None
    assert torch.equal(index[read.input_order], torch.arange(192) // 64)


def test_groups_of_unequal_sizes_are_refused() -> None:
    layout, scheme = CHECKPOINT_FORMATS["gptq"](), QuantScheme(bits=4, group_size=64, symmetric=True)
    store = gptq_store(scheme, 0x77777777, torch.zeros(192))
    (module,) = layout.modules(store, gptq_config(scheme)).values()
    with pytest.raises(CheckpointError, match=r"down_proj: g_idx does not put 64 inputs into each of 3 groups"):
        layout.read(store, module)


def test_rules_of_single_modules_are_followed() -> None:  # A27
    """One module of 8 bits among those of 4; one left out is plain, and one that is stored although left out is an error."""
    layout, four = CHECKPOINT_FORMATS["gptq"](), QuantScheme(bits=4, group_size=64, symmetric=True)
    eight = QuantScheme(bits=8, group_size=32, symmetric=True)
    other = "model.layers.0.self_attn.q_proj"
    matrices = {NAME: random_matrix(64, 192, four), other: random_matrix(64, 192, eight)}
    parts = [store_of(layout, {name: matrix})[0].tensors for name, matrix in matrices.items()]
    store = DictionaryStore({**parts[0], **parts[1], "model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)})
    rules = {r"-:.*up_proj": {}, r"+:.*q_proj": {"bits": 8, "group_size": 32}}
    modules = layout.modules(store, gptq_config(four, dynamic=rules))
    assert {name: module.scheme for name, module in modules.items()} == {NAME: four, other: eight}
    assert all(same(layout.read(store, module).matrix, matrices[name]) for name, module in modules.items())
    with pytest.raises(CheckpointError, match=r"q_proj is stored as codes, but the rule"):
        layout.modules(store, gptq_config(four, dynamic={r"-:.*q_proj": {}}))


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_format": "marlin"},
        {"format": "gptq_p"},
        {"is_marlin_format": True},
        {"pack_dtype": "int64"},
        {"rotation": "hadamard"},
        {"adapter": {"name": "lora"}},
        {"bits": 5},
    ],
    ids=str,
)
def test_gptq_refuses_other_layouts(settings: dict[str, Any]) -> None:
    scheme = QuantScheme(bits=4, group_size=64, symmetric=True)
    with pytest.raises(UnsupportedError, match=next(iter(settings))):
        CHECKPOINT_FORMATS["gptq"]().modules(DictionaryStore(), gptq_config(scheme, **settings))


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_one_scheme_a_checkpoint(name: str) -> None:
    """Mixed precision is for compressed-tensors, and the error says so."""
    schemes = {
        "a": QuantScheme(bits=4, group_size=64, symmetric=True),
        "b": QuantScheme(bits=4, group_size=32, symmetric=True),
    }
    with pytest.raises(UnsupportedError, match=r"one (scheme|group size)") as error:
        CHECKPOINT_FORMATS[name]().quantization_config(schemes, [])
    assert "compressed-tensors" in str(error.value)
