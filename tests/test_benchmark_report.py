"""Floors against arithmetic of their own, and tables and pictures made of recorded lines; no GPU is needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import floors, plots, report
from benchmarks.cases import Case, load_cases
from numba_tcnn.layout import grid_levels
from numba_tcnn.specs import GridSpec

ROOT = Path(__file__).parent.parent
CASES = {case.name: case for case in load_cases()}
RESULTS = max((ROOT / "benchmarks" / "results").glob("h200-*.jsonl"))  # the latest
DOCS = ROOT / "docs" / "performance.md"
B = 1 << 18


def with_optimizer(case: Case, optimizer: dict) -> Case:
    return replace(case, config=case.config | {"optimizer": optimizer})


def with_encoding(case: Case, encoding: dict) -> Case:
    return replace(case, config=case.config | {"encoding": encoding})


# ---------------------------------------------------------------------------------------------- floors


def test_a_bare_network() -> None:
    """64 float16 inputs, two hidden layers of 64, 16 float32 targets: below the first layer nothing learns."""
    floor = floors.training_floor(CASES["mlp_only_w64_h2"], B)
    products = 2 * B * (3 * (64 * 64 + 64 * 64 + 16 * 64) - 64 * 64)
    assert floor.batch["products"] == pytest.approx(products / 790e6)
    n_params = 64 * 64 + 64 * 64 + 16 * 64
    assert floor.batch["bytes"] == pytest.approx((B * (64 * 2 + 16 * 4) + 2 * n_params) / 5.9e6)  # 50 MB: in the L2
    assert floor.optimizer == pytest.approx(42 * n_params / 5.9e6)
    assert floor.batch["shared"] == floor.batch["look-ups"] == floor.batch["reductions"] == 0
    assert floor.microseconds == floor.batch["products"] + floor.optimizer and floor.bound_by == "products"
    beyond = floors.training_floor(CASES["mlp_only_w64_h2"], 2 * B)
    assert beyond.batch["bytes"] == pytest.approx((2 * B * (64 * 2 + 16 * 4) + 2 * n_params) / 4.3e6)


def test_inference_has_a_third_of_the_products_and_no_optimizer() -> None:
    floor = floors.inference_floor(CASES["mlp_only_w128_h4"], B)
    assert floor.batch["products"] == pytest.approx(2 * B * (4 * 128 * 128 + 16 * 128) / 790e6)
    assert floor.optimizer == 0 and floor.bound_by == "products"


def test_small_batches_are_bound_by_their_launch() -> None:
    floor = floors.inference_floor(CASES["mlp_only_w16_h2"], 1 << 10)
    assert (floor.microseconds, floor.bound_by) == (pytest.approx(3.0), "launch")


def test_levels_that_fit_shared_memory_are_looked_up_there() -> None:
    """Of nerf_density's 16 levels 3 do: 16^3, 24^3 and 36^3 entries of 4 bytes are below 227 KiB. The next has 54^3,
    all others 2^19."""
    floor = floors.training_floor(CASES["nerf_density"], B)
    assert floor.batch["shared"] == pytest.approx(3 * 8 * B * (1 / 1.4e6 + 2 / 1.6e6))
    assert floor.batch["look-ups"] == pytest.approx(8 * B * (1 / 537e3 + 12 / 260e3))
    assert floor.batch["reductions"] == pytest.approx(13 * 8 * B * 0.75 / 90e3)
    image = floors.training_floor(CASES["image_hash"], B)
    assert image.batch["shared"] == pytest.approx(16 * 4 * B * (1 / 1.4e6 + 2 / 1.6e6)) and image.bound_by == "shared"
    assert image.batch["look-ups"] == image.batch["reductions"] == 0


@pytest.mark.parametrize(
    ("keys", "look_ups", "reductions"),
    [
        ({"n_features_per_level": 1}, 13 * 8, 13 * 8 * 0.75),
        ({"n_features_per_level": 4}, 14 * 8, 13 * 8),
        ({"n_features_per_level": 8}, 14 * 8, 13 * 8 * 2),
        ({"interpolation": "Nearest"}, 13, 13),
        ({"stochastic_interpolation": True}, 13 * 8, 13),
    ],
)
def test_look_ups_and_reductions_of_other_grids(keys: dict, look_ups: float, reductions: float) -> None:
    """An entry of 8 features is one look-up of 16 bytes and two reductions; only narrow neighbours go together."""
    case = CASES["nerf_density"]
    floor = floors.training_floor(with_encoding(case, case.config["encoding"] | {"log2_hashmap_size": 18} | keys), B)
    assert floor.batch["look-ups"] == pytest.approx(look_ups * B / 537e3)
    assert floor.batch["reductions"] == pytest.approx(reductions * B / 90e3)


@pytest.mark.parametrize(
    ("size", "look_ups", "reductions"),
    [
        (18, 13 / 537e3, 13 / 90e3),
        (19, 1 / 537e3 + 12 / 260e3, 13 / 90e3),
        (21, 1 / 537e3 + 12 / 260e3, 13 / 90e3),
        (22, 1 / 537e3 + 2 / 260e3 + 10 / 137e3, 3 / 90e3 + 10 / 39e3),  # 54^3, then 81^3 and 122^3, then 2^22
    ],
)
def test_larger_tables_are_slower(size: int, look_ups: float, reductions: float) -> None:
    case = CASES["nerf_density"]
    floor = floors.training_floor(with_encoding(case, case.config["encoding"] | {"log2_hashmap_size": size}), B)
    assert floor.batch["look-ups"] == pytest.approx(8 * B * look_ups)
    assert floor.batch["reductions"] == pytest.approx(8 * B * 0.75 * reductions)


def test_a_grid_inside_a_composite_costs_what_it_costs_alone() -> None:
    case = CASES["nerf_density"]
    inside = {"otype": "Composite", "nested": [case.config["encoding"] | {"n_dims_to_encode": 3}]}
    assert floors.training_floor(with_encoding(case, inside), B) == floors.training_floor(case, B)


def test_touched_entries_are_those_that_random_samples_need() -> None:
    grid = GridSpec(n_input_dims=2, n_levels=1, base_resolution=31, per_level_scale=1.0)
    (level,) = grid_levels(grid)
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(20):
        cells = rng.integers(0, level.n_entries, (500, 4))
        counts.append(len(np.unique(cells)))
    assert floors.n_touched(grid, level, 500) == pytest.approx(np.mean(counts), rel=0.01)
    assert floors.n_touched(grid, level, 1 << 20) == pytest.approx(level.n_entries)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [
        ({"otype": "SGD"}, 18),
        ({"otype": "Adam", "skip_zero_grad_non_matrix_params": False}, 42),
        ({"otype": "ExponentialDecay", "nested": {"otype": "SGD"}}, 18),
        ({"otype": "EMA", "nested": {"otype": "Adam"}}, 50),
        ({"otype": "Novograd"}, 26),
    ],
)
def test_what_an_optimizer_moves(optimizer: dict, bytes_each: int) -> None:
    """Parameter, gradient and state read and written in float32 (Adam: two moments and a count), a copy written."""
    spec, _, made = with_optimizer(CASES["nerf_density"], optimizer).specs()
    assert floors.optimizer_bytes(spec, made, 16) == pytest.approx(bytes_each * 13_030_064)


def test_adam_moves_what_samples_touch_and_looks_at_the_rest() -> None:
    """16 samples need at most 8 entries of two features each on each of 16 levels; the network always learns."""
    spec, _, adam = CASES["nerf_density"].specs()
    n_network = 64 * 32 + 16 * 64
    n_table = 13_030_064 - n_network
    touched = floors.touched_params(spec, 16)
    assert 0.95 * 16 * 16 * 8 * 2 < touched <= 16 * 16 * 8 * 2
    expected = 42 * (n_network + touched) + 4 * (n_table - touched)
    assert floors.optimizer_bytes(spec, adam, 16) == pytest.approx(expected)


def test_an_optimizer_of_slices_moves_each_as_that_slice_does() -> None:
    slices = {
        "otype": "Composite",
        "nested": [
            {"otype": "SGD", "n_params_to_optimize": 3072},
            {"otype": "Adam", "n_params_to_optimize": 13_026_992},
        ],
    }
    spec, _, made = with_optimizer(CASES["nerf_density"], slices).specs()
    touched = floors.touched_params(spec, 16)
    expected = 18 * 3072 + 42 * touched + 4 * (13_030_064 - 3072 - touched)
    assert floors.optimizer_bytes(spec, made, 16) == pytest.approx(expected)


def test_nothing_was_measured_below_its_floor() -> None:
    _, rows = report.read_results(RESULTS)
    assert len(rows) > 50
    for row in rows:
        for kind, floor_of in floors.FLOORS.items():
            assert 1e3 * row[f"{kind}_ms"] > floor_of(CASES[row["config"]], row["batch"]).microseconds


def test_the_command_prints_a_line_a_call(capsys) -> None:
    assert floors.main(["--configs", "image_hash,sdf", "--batches", "14,18"]) == 0
    headings, *lines = capsys.readouterr().out.splitlines()
    assert headings.split()[:3] == ["bytes", "products", "shared"] and len(lines) == 8
    assert lines[2].split() == ["image_hash", "2^18", "train", "1.1", "14.3", "33.0", "5.1", "38.0", "shared"]
    assert floors.main(["--configs", "image"]) == 2 and "no configuration image" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- tables

ROW = {"config": "image_hash", "batch": B, "train_ms": 0.1, "infer_ms": 0.03, "host_us": 21.6}
BARE = {"config": "mlp_only_w64_h2", "batch": B, "train_ms": 0.05, "infer_ms": 0.02, "infer_half_ms": 0.018}
H200 = {"info": {"device": "NVIDIA H200"}}


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_rows_that_failed_or_were_not_measured_are_left_out(tmp_path) -> None:
    failed, skipped = ROW | {"config": "sdf", "failed": "wrong"}, {"config": "nrc", "skipped": "why"}
    path = write(tmp_path / "rows.jsonl", H200, ROW, failed, skipped, ROW | {"train_ms": 0.2})
    info, rows = report.read_results(path)
    assert info == H200["info"] and rows == [ROW | {"train_ms": 0.2}]  # the later of two


def test_the_fastest_of_a_peer_s_modes_counts(tmp_path) -> None:
    path = write(
        tmp_path / "peer.jsonl",
        {"info": {}},
        {"config": "a", "batch": 4, "mode": "jit", "train_ms": 3.0, "train_rm_ms": 2.5, "infer_ms": 1.0},
        {"config": "a", "batch": 4, "mode": "nojit", "train_ms": 2.75, "infer_guard_ms": 0.5, "infer_mp_ms": 0.25},
        {"config": "a", "batch": 8, "mode": "jit", "train_ms": 9.0, "infer_ms": None},
    )
    assert report.read_peers(path) == {
        ("a", 4): {"train_ms": 2.5, "infer_ms": 0.5, "infer_half_ms": 0.25},
        ("a", 8): {"train_ms": 9.0},
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_rows() -> None:
    peers = {("image_hash", B): {"train_ms": 0.481, "infer_ms": 0.062}}
    headings, _, first, second = map(cells, report.rows_table([ROW, BARE], peers, floors=True).splitlines())
    assert len(headings) == len(first) == len(second) == 15
    assert first == [
        "image_hash", "2^18", "100.0", "4.81", "38.0", "2.6", "shared", "30.0", "2.07", "12.0", "2.5", "shared",
        "", "22", "",
    ]  # fmt: skip
    assert second[:4] == ["mlp_only_w64_h2", "2^18", "50.0", ""] and second[-3:] == ["18.0", "", ""]
    *_, other = map(
        cells, report.rows_table([ROW | {"config": "a config of one's own"}], None, floors=True).splitlines()
    )
    assert other[:6] == ["a config of one's own", "2^18", "100.0", "", "", ""]
    without = report.rows_table([ROW], None, floors=False).splitlines()
    assert cells(without[0])[:4] == ["configuration", "batch", "train, us", "infer, us"]
    assert cells(without[2]) == ["image_hash", "2^18", "100.0", "30.0", "", "22", ""]


def test_the_table_of_floors_has_every_configuration_and_invents_nothing() -> None:
    lines = [cells(line) for line in report.floors_table("train", [ROW], B).splitlines()]
    assert [line[0] for line in lines[2:]] == list(CASES)
    by_name = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
    assert by_name["image_hash"]["measured, us"] == "100" and by_name["image_hash"]["gap"] == "2.6"
    assert by_name["sdf"]["measured, us"] == by_name["sdf"]["gap"] == "" != by_name["sdf"]["floor, us"]
    assert by_name["nrc"]["look-ups, us"] == ""
    other_batch = report.floors_table("train", [ROW], 2 * B).splitlines()
    assert cells(other_batch[2])[-3:-1] == ["", ""]


def test_another_card_has_no_floors() -> None:
    made = report.tables({"device": "NVIDIA A100"}, [ROW], None, B)
    assert set(made) == {"rows"} and "gap" not in made["rows"]
    assert set(report.tables(H200["info"], [ROW], None, B)) == {"rows", "ceilings", "floors"}


def test_ceilings_name_their_source() -> None:
    lines = [cells(line) for line in report.ceilings_table().splitlines()[2:]]
    assert [line[0] for line in lines] == list(floors.CEILINGS) and all(line[2] for line in lines)
    assert lines[0][1] == "4.3 T bytes read or written a second" and lines[-1][1] == "333 k calls a second"


def test_tables_of_a_document_are_replaced_where_they_stand() -> None:
    text = "a\n<!-- report: rows -->\n<!-- end -->\nb\n<!-- report: floors -->\nold\n<!-- end -->\nc\n"
    made = report.replace_tables(text, {"rows": "| new |", "floors": "| other |"})
    assert made.splitlines() == [
        "a", "<!-- report: rows -->", "| new |", "<!-- end -->", "b", "<!-- report: floors -->", "| other |",
        "<!-- end -->", "c",
    ]  # fmt: skip
    assert report.replace_tables(made, {"rows": "| new |"}) == made
    with pytest.raises(ValueError, match="no <!-- report: ceilings -->"):
        report.replace_tables(text, {"ceilings": "x"})


def test_the_documentation_has_the_floors_of_today() -> None:
    """Else: the command that docs/performance.md gives under "What bounds a row"."""
    made = report.tables(*report.read_results(RESULTS), None, B)
    text = DOCS.read_text()
    assert report.replace_tables(text, {name: made[name] for name in ("floors", "ceilings")}) == text


# --------------------------------------------------------------------------------------------- pictures

STAGES = [
    {"config": "image_hash", "batch": B, "call": "train", "us": 9.5,
     "stages": [{"kernel": "gradient", "us": 7.0}, {"kernel": "adam", "us": 3.0}]},
    {"config": "image_hash", "batch": B, "call": "infer", "us": 4.0, "stages": [{"kernel": "inference", "us": 4.0}]},
]  # fmt: skip


def test_throughput_by_batch() -> None:
    rows = [ROW, BARE, ROW | {"batch": 2 * B, "train_ms": 0.16}]
    train, infer = plots.by_batch(rows).axes
    assert [line.get_label() for line in train.lines] == ["image_hash", "mlp_only_w64_h2"]
    np.testing.assert_allclose(train.lines[0].get_xydata(), [(B, B / 1e-4), (2 * B, 2 * B / 1.6e-4)])
    np.testing.assert_allclose(infer.lines[1].get_xydata(), [(B, B / 2e-5)])
    assert list(train.get_xticks()) == [B, 2 * B]


def test_throughput_by_width() -> None:
    deep, wide = BARE | {"config": "mlp_only_w64_h4"}, BARE | {"config": "mlp_only_w128_h2", "train_ms": 0.2}
    train, _ = plots.by_width([ROW, wide, BARE, deep], load_cases()).axes
    labels = [line.get_label() for line in train.lines]
    assert labels == ["2 hidden layers, $2^{18}$ samples", "4 hidden layers, $2^{18}$ samples"]
    np.testing.assert_allclose(train.lines[0].get_xydata(), [(64, B / 5e-5), (128, B / 2e-4)])


def test_ratios_by_configuration() -> None:
    peers = {("image_hash", B): {"train_ms": 0.4}, ("mlp_only_w64_h2", B): {"train_ms": 0.025, "infer_ms": 0.06}}
    train, infer = plots.ratios([ROW, BARE, BARE | {"batch": 2 * B}], peers).axes
    np.testing.assert_allclose(train.collections[0].get_offsets(), [(4.0, 0), (0.5, 1)])
    np.testing.assert_allclose(infer.collections[0].get_offsets(), [(3.0, 1)])
    assert [text.get_text() for text in train.get_yticklabels()] == ["image_hash", "mlp_only_w64_h2"]


def test_stages_stand_behind_one_another() -> None:
    train, infer = plots.by_stage(STAGES).axes
    assert [(bar.get_x(), bar.get_width()) for bar in train.patches] == [(0, 7), (7, 3)]
    assert [(bar.get_x(), bar.get_width()) for bar in infer.patches] == [(0, 4)]
    assert len({bar.get_facecolor() for bar in (*train.patches, *infer.patches)}) == 3


def test_the_report_writes_its_tables_and_pictures(tmp_path, capsys) -> None:
    results = write(tmp_path / "rows.jsonl", H200, ROW, BARE)
    peer = write(tmp_path / "peer.jsonl", {"config": "image_hash", "batch": B, "train_ms": 0.4, "infer_ms": 0.1})
    stages = write(tmp_path / "stages.jsonl", H200, *STAGES)
    arguments = [str(results), "--tcnn", str(peer), "--stages", str(stages), "--plots", str(tmp_path / "plots")]
    assert report.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| configuration | batch |") and "Inference:\n\n| configuration |" in out
    names = {"throughput_batch.png", "throughput_width.png", "ratios.png", "stages.png"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names == {Path(p).name for p in err.split()}
    docs = tmp_path / "docs.md"
    docs.write_text("".join(f"<!-- report: {name} -->\n<!-- end -->\n" for name in ("rows", "floors", "ceilings")))
    assert report.main([str(results), "--docs", str(docs)]) == 0
    assert docs.read_text().count("<!-- end -->") == 3 and "| image_hash | 2^18 | 100.0 |" in docs.read_text()


@pytest.mark.parametrize("content", ["", '{"info": {}}\n'])
def test_a_file_without_rows_is_one_line(tmp_path, capsys, content) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    assert report.main([str(path)]) == 2
    assert capsys.readouterr().err == f"{path} has no row that was measured\n"
    assert report.main([str(tmp_path / "none.jsonl")]) == 2 and "No such file" in capsys.readouterr().err
