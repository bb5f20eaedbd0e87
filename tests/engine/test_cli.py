"""The command line: what it prints, how it fails, what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cli import main

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "text", "token_ids", "prompt_tokens", "new_tokens", "finish_reason", "ttft_s", "finished_s", "decode_s",
    "decode_tok_s", "rounds", "acceptance_rate", "acceptance_by_position", "mean_acceptance_length", "experts", "time",
    "overlap", "draft_alarm", "memory", "config",
}  # fmt: skip
EXPERTS = {
    "requests", "hits", "late", "misses", "prefetched", "prefetch_used", "prefetch_wasted", "bytes_loaded",
}  # fmt: skip
TIME = {"draft_s", "verify_s", "stall_s", "transfer_s", "overlapped_s"}
MEMORY = {"shared", "draft", "cache", "kv", "total"}


@pytest.fixture
def model(tiny_model) -> str:
    return str(tiny_model("qwen3_moe", max_shard_size="30KB").directory)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Where packs and temporary files of this test would be."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("SPECVIZ_CACHE", str(directory))
    return directory


@pytest.fixture
def fails(capsys, cache) -> Callable[..., str]:
    """fails(status, arguments…) → the one line that the user reads."""

    def check(status: int, *arguments: str) -> str:
        assert main([*arguments]) == status
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
        whole = ("experts.pack", "experts.json", "libspecviz.so")
        assert [path for path in cache.rglob("*") if path.is_file() and path.name not in whole] == []
        return err

    return check


WRONG_USAGE = (
    "--nope", "--cache=lots", "--cache=0", "--cache=0%", "--cache=101%", "--cache=0MiB", "--cache=-1", "--cache=",
    "--link=usb", "--link=emulated", "--link=emulated:fast", "--link=emulated:0", "--link=emulated:nan",
    "--link=emulated:1:-5", "--link=emulated:1:2:3", "--link=disk:3", "--link=host:1",
    "--device=tpu", "--device=cuda", "--misses=compute",
    "--k=many", "--k=-1", "--k=17", "--k=1.5", "--k-max=0", "--k-max=17", "--stop=", "--stop",
    "--temperature=warm", "--temperature=-0.1", "--temperature=nan", "--temperature=11",
    "--top-k=-1", "--top-p=0", "--top-p=1.1", "--top-p=nan", "--seed=-1", "--seed=99999999999999999999",
    "--max-new-tokens=0", "--max-new-tokens=257", "--max-new-tokens=x", "--batch=0", "--batch=257",
    "--threads=0", "--threads=x",
    "--kernels=", "--kernels=fast", "--kernels=all,linear", "--kernels=linear,",
    "--draft=parrot", "--draft=model:", "--policy=random", "--prefetch=psychic", "--dtype=int1",
    "--trace=/nonexistent/trace.ndjson", "--trace=.",
)  # fmt: skip


@pytest.mark.parametrize("option", WRONG_USAGE)
def test_wrong_usage(option: str, model: str, fails):
    fails(2, "generate", "--model", model, "--prompt", "Hello", option)


@pytest.mark.parametrize(
    "arguments",
    (
        [],
        ["dance"],
        ["generate"],
        ["generate", "--prompt", "a", "--prompt-file", "b"],
        ["bench"],
        ["bench", "--suite", "speed"],
        ["bench", "--suite", "kernels", "--repeats", "0"],
        ["doctor", "--nope"],
        ["upcycle", "--base", "somewhere"],
    ),
)
def test_wrong_commands(arguments: list[str], fails):
    fails(2, *arguments)


def test_prompts_that_cannot_run(model: str, fails, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_text(" \n")
    start = ["generate", "--model", model]
    assert "empty" in fails(2, *start, "--prompt", "")
    assert "empty" in fails(2, *start, "--prompt", " \n\t")
    assert "empty" in fails(2, *start, "--prompt-file", str(tmp_path / "blank.txt"))
    assert "UTF-8" in fails(2, *start, "--prompt-file", str(tmp_path / "latin.txt"))
    assert "No such file" in fails(2, *start, "--prompt-file", str(tmp_path / "absent.txt"))
    assert "directory" in fails(2, *start, "--prompt-file", str(tmp_path))
    assert "context of 256" in fails(2, *start, "--prompt", "long " * 300)
    assert "character 8" in fails(2, *start, "--prompt", "a kite \udcff")


def test_an_empty_prompt_is_refused_before_torch_is_imported():
    script = (
        "import sys; from engine.cli import main; status = main(['generate', '--prompt', '']); "
        "assert (status, 'torch' in sys.modules) == (2, False)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("link", ("emulated:5000", "emulated:1e-9", "emulated:1:500000"))
def test_a_link_that_its_knobs_cannot_be_set_to_is_refused_before_anything_loads(link: str, fails):
    assert "out of range" in fails(2, "generate", "--prompt", "a", "--model", "/nonexistent", "--link", link)


def test_ranges_are_told_digit_by_digit(fails):
    assert "use 0 to 2147483647" in fails(2, "generate", "--prompt", "a", "--seed", "-1")


def test_models_that_cannot_run(dense_model, tmp_path, fails):
    assert "not a Mixture-of-Experts" in fails(1, "generate", "--prompt", "a", "--model", str(dense_model.directory))
    assert "no model at" in fails(1, "generate", "--prompt", "a", "--model", str(tmp_path / "absent"))
    assert "config.json" in fails(1, "generate", "--prompt", "a", "--model", str(tmp_path))
    assert "hub" in fails(1, "generate", "--prompt", "a", "--model", "nobody/has-this")


def test_a_budget_without_room(model: str, fails):
    message = fails(1, "generate", "--model", model, "--prompt", "Hello", "--cache", "1KiB")
    assert "at least 18432 bytes" in message  # 2 MoE layers × 3 matrices of 24 × 32 float32


def _second_shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[1]


def _cut(nbytes: int) -> Callable[[Path], None]:
    """The second shard loses its end, or keeps only its beginning."""
    return lambda d: os.truncate(_second_shard(d), nbytes if nbytes >= 0 else _second_shard(d).stat().st_size + nbytes)


def _edit_index(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard is missing": (lambda d: _second_shard(d).unlink(), "lacks model-00002"),
    "cut off in the header": (_cut(20), "cut off"),
    "cut off in the data": (_cut(-1), "cut off"),
    "an empty shard": (_cut(0), "cut off"),
    "a shard of zeros": (lambda d: _second_shard(d).write_bytes(bytes(4096)), "header"),
    "absent tensors": (_edit_index(lambda m: m.update(ghost=next(iter(m.values())))), "ghost"),
    "a shard that is not named": (_edit_index(lambda m: [m.pop(n) for n in [*m] if ".2.mlp.experts" in n]), "lacks"),
    "an index that is no JSON": (lambda d: (d / "model.safetensors.index.json").write_text("{"), "JSON"),
    "an index that is a list": (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "map"),
    "no weights": (lambda d: [path.unlink() for path in d.glob("*.safetensors*")], "lacks model.safetensors"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer"),
    "a config that is no JSON": (lambda d: (d / "config.json").write_text("{"), "config"),
}


@pytest.mark.parametrize("damage, reason", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_checkpoints(damage: Callable[[Path], None], reason: str, model: str, tmp_path, fails):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    damage(copy)
    assert reason in fails(1, "generate", "--model", str(copy), "--prompt", "Hello")


def test_a_traceback_only_with_debug(dense_model, fails, monkeypatch):
    arguments = ["generate", "--model", str(dense_model.directory), "--prompt", "a"]
    with pytest.raises(Exception, match="Mixture-of-Experts"):
        main([*arguments, "--debug"])
    monkeypatch.setattr("engine.cli._engine_config", lambda options: 1 / 0)
    assert "ZeroDivisionError" in fails(1, *arguments)
    with pytest.raises(ZeroDivisionError):
        main([*arguments, "--debug"])


def test_json_is_one_object_with_the_documented_keys(model: str, cache, capsys):
    trace = cache.parent / "trace.ndjson"
    arguments = ["generate", "--model", model, "--prompt", "Hello", "--max-new-tokens", "9", "--trace", str(trace)]
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    result = json.loads(out)
    assert set(result) == KEYS
    assert set(result["experts"]) >= EXPERTS
    assert (set(result["time"]), set(result["memory"])) == (TIME, MEMORY)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert (events[0]["kind"], events[-1]["kind"]) == ("run_start", "run_end")
    assert events[-1]["summary"] == [result]
    assert list(cache.parent.glob("*.partial")) == []
    # The same as text.
    assert main(arguments) == 0
    assert capsys.readouterr().out == result["text"] + "\n"


FLAGS: dict[str, tuple[str, str, object]] = {
    "--draft": ("self-int8", "draft", "self-int8"),
    "--policy": ("lfu", "policy", "lfu"),
    "--device": ("cpu", "device", "cpu"),
    "--misses": ("fetch", "misses", "fetch"),
    "--prefetch": ("none", "prefetch", "none"),
    "--cache": ("3", "cache", 3),
    "--link": ("emulated:2:7", "link", {"kind": "emulated", "gbps": 2.0, "latency_us": 7.0, "preset": None}),
    "--dtype": ("bfloat16", "dtype", "bfloat16"),
    "--threads": ("2", "threads", 2),
    "--max-new-tokens": ("2", "max_new_tokens", 2),
    "--temperature": ("0.5", "temperature", 0.5),
    "--top-k": ("5", "top_k", 5),
    "--top-p": ("0.5", "top_p", 0.5),
    "--seed": ("7", "seed", 7),
    "--stop": ("END", "stop", ["END"]),
    "--k": ("3", "k", 3),
    "--k-max": ("5", "k_max", 5),
    "--batch": ("3", "batch", 3),
    "--kernels": ("experts,attention", "kernels", ["attention", "experts"]),
}


def test_every_flag_reaches_the_configuration(model: str, cache, capsys):
    start = ["generate", "--model", model, "--prompt", "Hello", "--json"]

    def config(*extra: str) -> dict:
        tokens = [] if "--max-new-tokens" in extra else ["--max-new-tokens", "3"]
        assert main([*start, *tokens, *extra]) == 0
        return json.loads(capsys.readouterr().out)["config"]

    usual = config()
    for flag, (text, name, value) in FLAGS.items():
        assert usual[name] != value
        assert config(flag, text)[name] == value, flag
    assert usual["model"] == model
    assert (usual["pack"], config("--no-pack")["pack"]) == (True, False)
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    known = {word.strip(",") for word in capsys.readouterr().out.split() if word.startswith("--")}
    told = {"--help", "--model", "--prompt", "--prompt-file", "--trace", "--json", "--debug", "--no-pack", "--chat"}
    told |= {"--profile"}  # whatever it says is an option, too: tests/engine/test_tune_command.py
    assert {word for word in known if word.strip("-")} - told == set(FLAGS)


def _shell(command: str) -> subprocess.CompletedProcess:
    script = command.replace("ENGINE", f"'{sys.executable}' -m engine")
    return subprocess.run(["bash", "-o", "pipefail", "-c", script], cwd=ROOT, capture_output=True, timeout=120)


def test_a_reader_that_leaves_early(model: str, cache):
    done = _shell(f"ENGINE generate --model '{model}' --prompt Hello --max-new-tokens 60 | head -c 5")
    assert (done.returncode, len(done.stdout)) == (0, 5), done.stderr
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr


def test_a_draft_that_is_never_right_is_told(tiny_model, dense_model, capsys):
    """Two random models agree on nothing."""
    target, draft = tiny_model("mixtral").directory, dense_model.directory
    options = ["--prompt=Hello", "--max-new-tokens=48", "--k=2", f"--model={target}", f"--draft=model:{draft}"]
    assert main(["generate", *options]) == 0
    assert "switched off: 0 of 31 first tokens" in capsys.readouterr().err
    assert main(["generate", "--json", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "switched off: 0 of 31 first tokens" in result["draft_alarm"]
    assert (result["rounds"], result["acceptance_rate"]) == (48, 0.0)


def test_a_fresh_process_says_one_line(dense_model, cache):
    """Nothing that libraries log while they are imported comes between."""
    done = _shell(f"ENGINE generate --model '{dense_model.directory}' --prompt Hello")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1
