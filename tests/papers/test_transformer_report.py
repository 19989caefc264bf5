"""``pipeplan estimate``: what it prints, its figures as JSON, and one sentence for every kind of bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cases.patience import SECONDS
from conftest import Command

from pipeplan.zoo.sizes import TRANSFORMERS

TABLE_2 = ["--model", "myelin-12b", "--gpus", "48", "--inter", "6", "--microbatch", "8", "--batch", "16384"]
OWN = ["--layers", "4", "--hidden", "64", "--heads", "4", "--sequence", "32", "--vocabulary", "100"]


def test_the_12b_row_fits_with_a_checkpoint_every_four_layers(pipeplan: Command) -> None:
    code, out, err = pipeplan("estimate", *TABLE_2, "--offload", "--gpu", "v100", "--ac", "4")
    assert (code, err) == (0, "")
    assert "11.962e9 parameters" in out
    assert "48 GPUs = 6 stages x 8 pipelines; a batch of 16384 is 256 microbatches of 8" in out
    assert "assumed: all-reduce at 12 GB/s" in out
    assert "fits        13.62 GB of 16 GB at most" in out
    assert "ac          4; 8 is Myelin's rule, nearest to sqrt(N) = 6.93" in out
    assert "flops       8.134e+17 per batch" in out
    assert "112.2 days" in out
    assert max(map(len, out.splitlines())) <= 120


def test_the_papers_rule_overflows_the_outer_stages_and_exits_1(pipeplan: Command) -> None:
    code, out, err = pipeplan("estimate", *TABLE_2, "--offload", "--mem", "16GB")
    assert (code, err) == (1, "")
    assert "too large   2 of 6 stages for 16 GB; stage 5 needs 17.10 GB, an even share fits" in out
    assert "with 17.10 GB of memory, or ac = 6 (2 takes the least), or 12 stages x 4 with ac = 2" in out
    assert "as misprinted 60, 42.68 GB, least at sqrt(N/G_inter) = 2.83" in out
    assert "days" not in out  # nothing said what a GPU's peak is
    code, out, _ = pipeplan("estimate", *TABLE_2, "--mem", "16GB")
    assert code == 1
    assert "6 of 6 stages" in out
    assert "an even share does not fit" in out
    assert "offload with ac = 2" in out


def test_json_has_every_class_of_bytes(pipeplan: Command) -> None:
    code, out, _ = pipeplan("estimate", *TABLE_2, "--offload", "--mem", "16GB", "--peak", "125", "--json")
    figures = json.loads(out)
    assert code == 1
    assert figures["grid"] == {
        "gpus": 48, "inter": 6, "data": 8, "microbatch": 8, "batch": 16384, "microbatches": 256, "limit": 6,
    }  # fmt: skip
    memory = figures["memory"]
    assert [stage["fits"] for stage in memory["stages"]] == [False, True, True, True, True, False]
    assert (memory["fits"], memory["even_share"]["fits"]) == (False, True)
    for row in (memory["even_share"], *memory["stages"]):
        parts = ("weights", "gradient", "optimizer", "bucket", "activation", "buffer")
        assert row["total_bytes"] == sum(row[f"{part}_bytes"] for part in parts)
    assert memory["all_gpus_bytes"] == 8 * sum(stage["total_bytes"] for stage in memory["stages"])
    assert figures["time"]["days"] == pytest.approx(112.2, abs=0.1)
    assert figures["checkpointing"]["paper_ac"] == 8
    assert pipeplan("estimate", *TABLE_2, "--offload", "--mem", "16GB", "--peak", "125", "--json")[1] == out


def test_pipelines_share_the_optimizers_state(pipeplan: Command) -> None:
    arguments = ["estimate", *TABLE_2, "--ac", "4", "--mem", "32GB"]
    code, alone, _ = pipeplan(*arguments)
    assert code == 1
    assert "feasible    with 48.34 GB of memory, or --zero 1, or offload, or 12 stages x 4" in alone
    code, shared, _ = pipeplan(*arguments, "--zero", "1")
    assert code == 0
    assert "mixed precision, Adam, no offload, state shared by 8 pipelines; a checkpoint every 4 layers" in shared
    assert "fits        17.73 GB of 32 GB at most" in shared
    parameters = -(-TRANSFORMERS["myelin-12b"].parameters // 6)
    offloaded = json.loads(pipeplan(*arguments, "--offload", "--zero", "1", "--json")[1])["memory"]["even_share"]
    assert offloaded["host_bytes"] == 12 * -(-parameters // 8)
    assert offloaded["bucket_bytes"] == 16 * 16 * 10**6


def test_80_columns_show_every_figure(pipeplan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = pipeplan("estimate", *TABLE_2, "--offload", "--mem", "16GB")
    assert "…" not in out
    assert "26.23" in out
    assert max(map(len, out.splitlines())) <= 80


def test_own_sizes_override_and_one_gpu_is_the_default(pipeplan: Command) -> None:
    code, out, _ = pipeplan("estimate", *OWN, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["grid"]["gpus"] == 1
    assert figures["memory"]["fits"] is None
    assert figures["model"]["parameters"] == 4 * (12 * 64**2 + 13 * 64) + 132 * 64 + 2 * 64
    untied = json.loads(pipeplan("estimate", *OWN, "--untied", "--json")[1])
    assert untied["model"]["parameters"] - figures["model"]["parameters"] == 100 * 64
    longer = json.loads(pipeplan("estimate", "--model", "gpt2-xl", "--sequence", "2048", "--json")[1])
    assert (longer["model"]["sequence"], longer["model"]["layers"]) == (2048, 48)
    for arguments in (["--gpus", "2x4", "--data-parallel", "2"], ["--inter", "4", "--data", "2"]):
        grid = json.loads(pipeplan("estimate", "--model", "gpt2-xl", *arguments, "--json")[1])["grid"]
        assert (grid["gpus"], grid["inter"], grid["data"], grid["batch"]) == (8, 4, 2, 32)
    code, out, _ = pipeplan("estimate", *OWN, "--ac", "none")
    assert code == 0
    assert "nothing recomputed" in out
    assert "on 1 GPU = 1 stage x 1 pipeline; a batch of 4 is 4 microbatches of 1 for each pipeline" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "say the network: --model, or also --layers, --hidden, --heads, --sequence, --vocabulary"),
        (["--layers", "4"], "or also --hidden"),
        (["--model", "gpt-5"], "no GPT or Llama is named 'gpt-5'; known are gpt-tiny"),
        (["--model", "gpt2-xl", "--heads", "7"], "hidden: 1600 is not a multiple of heads: 7"),
        (["--model", "gpt2-xl", "--gpus", "8"], "8 GPUs can be many grids; say also --inter or --data"),
        (["--model", "gpt2-xl", "--gpus", "8", "--inter", "3"], "--gpus: 8 is not a multiple of --inter 3"),
        (["--model", "gpt2-xl", "--gpus", "8", "--data", "3"], "--gpus: 8 is not a multiple of --data-parallel 3"),
        (
            ["--model", "gpt2-xl", "--gpus", "8", "--inter", "2", "--data", "2"],
            "--inter 2 times --data-parallel 2, which is 4",
        ),
        (["--model", "gpt2-xl", "--inter", "49"], "inter: 49 stages are more than the network's 48 layers"),
        (["--model", "gpt2-xl", "--data", "3", "--batch", "16"], "batch: 16 is not a multiple of 3"),
        (["--model", "gpt2-xl", "--ac", "0"], "--ac: '0' is neither a positive number of layers nor none"),
        (["--model", "gpt2-xl", "--ac", "few"], "--ac: 'few' is neither"),
        (["--model", "gpt2-xl", "--inter", "6", "--ac", "9"], "ac: 9 is more than the 8 layers of the largest stage"),
        (["--model", "gpt2-xl", "--mem", "16"], "--mem: '16' has no unit"),
        (["--model", "gpt2-xl", "--share", "0.5"], "'0.5' is not a percentage"),
        (["--model", "gpt2-xl", "--share", "0%"], "--share: 0% of the peak is less than 0.01%"),
        (["--model", "gpt2-xl", "--share", "nan%"], "not"),
        (["--model", "gpt2-xl", "--peak", "nan"], "--peak: nan is not a number"),
        (["--model", "gpt2-xl", "--peak", "0"], "0.0 is not in the range"),
        (["--model", "gpt2-xl", "--tokens", "many"], "--tokens: 'many' is not a positive whole number"),
        (["--model", "gpt2-xl", "--tokens", "1e999999999"], "--tokens: '1e999999999' is not a positive whole number"),
        (["--model", "gpt2-xl", "--tokens", "0.5"], "--tokens: '0.5' is not"),
        (["--model", "gpt2-xl", "--gpu", "abacus"], "no accelerator is named 'abacus'"),
        (["--model", "gpt2-xl", "--gpu", "gtx1080ti"], "no peak is known for float16"),
        (["--model", "gpt2-xl", "--bandwidth", "fast"], "--bandwidth: 'fast' is not"),
        (["--model", "gpt2-xl", "--microbatch", "0"], "0 is not in the range"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, pipeplan: Command) -> None:
    code, out, err = pipeplan("estimate", *arguments)
    assert (code, out) == (2, "")
    assert sentence in " ".join(err.split())
    assert "Traceback" not in err


def test_no_torch_is_imported() -> None:
    code = "import sys; from pipeplan.cli import main; main()"
    script = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); {code}"
    done = subprocess.run(
        [sys.executable, "-c", script, "estimate", *TABLE_2],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stderr.strip() == "False"
