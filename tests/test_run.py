"""One run from the command line: everything it leaves behind is there, agrees and is right."""

import json
import math
import subprocess

import pytest
import yaml

from harness.config import load
from harness.rundir import RunDir, config_hash
from tests.launched import BIN, FORMS, Launched

STEPS = 12
OVERRIDES = [
    "+exp=zero2", f"train.steps={STEPS}", "train.eval_every=128", "train.log_every=5", "batch.micro_size=4",
    "data.eval_samples=13", "data.seq_len=64", "study=record", "lr.rule=linear", "lr.base_batch_size=16",
    "wandb.mode=offline",
]  # fmt: skip
SECRETS = {
    "WANDB_API_KEY": "5ec2e7" * 6 + "aaaa", "HF_TOKEN": "hf_5ec2e75ec2e7", "AWS_SECRET_ACCESS_KEY": "5ec2e7/aws/5ec2e7"
}  # fmt: skip


def read_wandb(run: RunDir) -> tuple[list[dict], dict, dict, int]:
    """History, summary, run record and exit code of an offline W&B run, by W&B's own reader."""
    (folder,) = run.path.glob("wandb/offline-run-*")
    command = [str(BIN / "wandb"), "leet", "inspect", "--json", str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in printed.splitlines()]
    of_type = {kind: [r[kind] for r in records if r["type"] == kind] for kind in ("history", "summary", "run", "exit")}
    summary: dict = {}
    for record in of_type["summary"]:
        summary |= record["update"]
    run_record = of_type["run"][0]
    for record in records:
        run_record["config"]["update"] |= record.get("config", {}).get("update", {})
    history = [record["item"] for record in of_type["history"]]
    return history, summary, run_record, of_type["exit"][0].get("exit_code", 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    launched = Launched([*FORMS["python"], *OVERRIDES], tmp_path_factory.mktemp("record"), **SECRETS)
    assert launched.wait() == 0, launched.text()
    return launched.run()


def test_the_run_directory_is_complete(run):
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        "config.yaml", "ds_config.json", "command.txt", "env.json", "status.json", "metrics.jsonl", "summary.json",
        "logs", "wandb",
    }  # fmt: skip
    config = load((run.path / "config.yaml").read_text())
    assert run.path.name == f"gpt2_tiny-zero2-w2-b32-{config_hash(config)}"
    assert run.path.parent.name == "record"
    ds_config = json.loads((run.path / "ds_config.json").read_text())
    assert ds_config["zero_optimization"]["stage"] == 2 and ds_config["gradient_accumulation_steps"] == 4
    environment = json.loads((run.path / "env.json").read_text())
    assert environment["versions"]["deepspeed"] and environment["hardware"]["cores"] >= 1
    assert len(environment["corpus_fingerprint"]) == 16
    command = (run.path / "command.txt").read_text()
    assert command.startswith("python harness/main.py +exp=zero2") and command.endswith("launch.world_size=2\n")
    assert {path.name for path in run.logs.iterdir()} == {"rank0.log", "rank1.log"}
    status = run.read_status()
    assert status["status"] == "completed" and status["reason"] == "" and status["host"] and status["pid"] > 0


def test_metrics_have_one_row_per_update(run):
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["samples"] for row in rows] == [32 * step for step in range(1, STEPS + 1)]
    assert [row["tokens"] for row in rows] == [32 * 64 * step for step in range(1, STEPS + 1)]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8, 12]
    assert rows[0]["lr"] == pytest.approx(2 * 2e-3 * 32 / 320)
    walls = [row["wall_s"] for row in rows]
    assert walls == sorted(walls)
    for row in rows:
        assert row["grad_norm"] > 0 and math.isfinite(row["grad_norm"])
        assert row["tokens_per_s"] == pytest.approx(32 * 64 / row["step_time_s"])
        assert 0 <= row["data_wait_s"] < row["step_time_s"]


def test_the_summary_follows_from_the_metrics(run):
    rows, summary = run.read_metrics(), run.read_summary()
    counted = [row["step_time_s"] for row in rows[5:]]
    assert summary["tokens_per_s"] == pytest.approx(len(counted) * 32 * 64 / sum(counted))
    assert summary["tokens_per_s_per_rank"] == pytest.approx(summary["tokens_per_s"] / 2)
    assert summary["samples_per_s"] == pytest.approx(summary["tokens_per_s"] / 64)
    assert summary["final_loss"] == rows[-1]["loss"] and summary["first_loss"] == rows[0]["loss"]
    assert summary["eval_loss"] == rows[-1]["eval_loss"]
    assert summary["grad_accum_steps"] == 4 and summary["micro_batch_size"] == 4
    assert summary["lr"] == pytest.approx(4e-3)
    assert summary["skipped_steps"] == 0
    assert summary["checkpoint_time_s"] == summary["load_time_s"] == 0
    # ZeRO-2 in DeepSpeed reduces gradients in every micro step: 4 x all-reduce and one all-gather of the half
    parameters = 4 * summary["n_params"]
    assert summary["comm_bytes_per_step"]["all_reduce"] == pytest.approx(4 * parameters, rel=1e-2)
    assert summary["comm_bytes_per_step"]["all_gather"] == pytest.approx(parameters / 2, rel=1e-2)
    assert summary["param_bytes"] == parameters
    assert summary["optimizer_bytes"] == pytest.approx(3 * parameters / 2, rel=1e-2)


def test_the_summary_says_what_was_predicted_and_by_how_much_it_was_missed(run):
    summary = run.read_summary()
    predicted, residual = summary["predicted"], summary["residual"]
    for key in ("param_bytes", "grad_bytes", "optimizer_bytes", "comm_traffic_bytes"):
        assert summary[key] == pytest.approx(predicted[key], rel=1e-2), key
        assert residual[key] == pytest.approx(summary[key] / predicted[key] - 1)
    assert predicted["comm_bytes_per_step"] == pytest.approx(summary["comm_bytes_per_step"], rel=1e-2)
    assert predicted["comm_calls_per_step"] == summary["comm_calls_per_step"]
    assert set(residual["comm_bytes_per_step"]) == {"all_reduce", "all_gather"}
    assert predicted["peak_memory_bytes"] is predicted["mfu"] is summary["mfu"] is summary["hfu"] is None
    flops = 6 * (summary["n_params"] - 512 * 128) + 12 * 4 * 128 * 64 / 2  # of all products, and causal attention
    assert summary["tflops_per_rank"] == pytest.approx(flops * summary["tokens_per_s"] / 2e12, rel=2e-2)


def test_wandb_holds_the_same(run):
    history, summary, record, exit_code = read_wandb(run)
    rows = run.read_metrics()
    assert len(history) == len(rows)
    for logged, row in zip(history, rows, strict=True):
        assert {key: logged[key] for key in row} == row
    for key, value in run.read_summary().items():
        if isinstance(value, (int, float)) and key != "wandb_dir":
            assert summary[key] == value, key
    written = yaml.safe_load((run.path / "config.yaml").read_text())
    assert {key: record["config"]["update"][key] for key in written} == written
    assert record["config"]["update"]["derived"]["n_params"] == run.read_summary()["n_params"]
    assert (record["run_group"], record["job_type"]) == ("record", "zero2")
    assert record["run_id"] == f"record-{config_hash(load((run.path / 'config.yaml').read_text()))}-1"
    assert exit_code == 0


def test_no_secret_of_the_environment_is_written_into_a_run(run):
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert {"env.json", "rank0.log", "rank1.log"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    for path in [*files, run.path.parents[2] / "output.txt"]:
        content = path.read_bytes()
        assert not [name for name, secret in SECRETS.items() if secret.encode() in content], path


def test_run_again_after_completion_the_earlier_record_moves_aside(run, tmp_path):
    config = load((run.path / "config.yaml").read_text())
    config.runs_dir = str(tmp_path)
    first = RunDir.create(config, "command")
    first.write_status("completed")
    again = RunDir.create(config, "command")
    assert again.path == first.path and again.read_status()["status"] == "running"
    aside = RunDir(first.path.with_name(first.path.name + ".1"))
    assert aside.read_status()["status"] == "completed"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"status": "running"}', '{"status"'])
def test_a_damaged_status_blocks_nothing(text, run, tmp_path):
    config = load((run.path / "config.yaml").read_text())
    config.runs_dir = str(tmp_path)
    first = RunDir.create(config, "command")
    (first.path / "status.json").write_text(text)
    assert RunDir.create(config, "command").read_status()["status"] == "running"


def test_a_run_again_has_a_wandb_id_of_its_own(run, tmp_path):
    config = load((run.path / "config.yaml").read_text())
    config.runs_dir = str(tmp_path)
    RunDir.create(config, "command").write_status("completed")
    assert RunDir.create(config, "command").read_status()["wandb_attempt"] == 2
