"""The commands, as a shell runs them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiooffload.service.cli import main
from aiooffload.service.config import Config
from tests.service.support import ROOT, SAMPLE


def aiooffload(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aiooffload", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30, **options)


def test_run_answers_one_request() -> None:
    """``run`` prints the outputs of one request, as text or as JSON, and stops the program's own things."""
    done = aiooffload("run", "--device", "host", "--endpoint", "double", SAMPLE, "x=[1, 2.5]")
    assert (done.stdout, done.stderr, done.returncode) == ("y (FP32, 2): [2.0,5.0]\n", "", 0)


def test_flags_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag may be between the program and its inputs, or behind them; a mistake shows the usage of the command."""
    for arguments in (
        [SAMPLE, "--endpoint", "double", "x=[1]", "--device", "host"],
        [SAMPLE, "x=[1]", "--device=host", "--endpoint=double"],
        ["--device", "host", SAMPLE, "--endpoint", "double", "x=[1]"],
    ):
        assert main(["run", *arguments]) == 0
        assert capsys.readouterr().out == "y (FP32, 1): [2.0]\n"
    with pytest.raises(SystemExit) as caught:
        main(["run", SAMPLE, "--no-such-flag", "x=[1]"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: aiooffload run ")


def test_run_in_this_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An input may be JSON or a file; what a client would be told of a mistake is told here."""
    np.save(tmp_path / "x.npy", np.array([3.0], np.float32))
    np.save(tmp_path / "wrong.npy", np.array([3.0]))

    def run(*arguments: str) -> tuple[int, str, str]:
        flags = [one for one in arguments if "=" not in one and one != "x"]
        status = main(["run", "--device", "host", *flags, SAMPLE, *(one for one in arguments if one not in flags)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    status, out, _ = run("--json", f"x=@{tmp_path}/x.npy")
    assert (status, json.loads(out)) == (0, [{"name": "y", "datatype": "FP32", "shape": [1], "data": [6.0]}])
    for arguments, expected, text in [
        ([f"x=@{tmp_path}/wrong.npy"], 2, "is FP32, the file has float64"),
        ([f"x=@{tmp_path}/none.npy"], 2, "cannot be read"),
        (["x"], 2, "NAME=JSON"),
        (["x=[1"], 2, "is not JSON"),
        (["y=[1]"], 1, "unexpected input 'y'"),
        (["x=[[1]]"], 1, "has shape"),
        ([], 1, "has no input 'x'"),
        (["--endpoint", "nothing"], 2, "has no endpoint 'nothing'"),
        (["--endpoint", "fail", "x=[1]"], 1, "secret or not"),
        (["--endpoint", "fail", "x=[2]"], 2, "secret or not"),
    ]:
        status, out, error = run(*arguments)
        assert (status, out) == (expected, ""), arguments
        assert text in error


def test_run_fails_as_a_server_would(tmp_path: Path) -> None:
    """A kernel that failed unseen is no success, and the stop hooks run whatever the handler did."""
    for endpoint, text in (("unseen", "kernel fails raised LookupError"), ("fail", "secret or not")):
        goodbye = tmp_path / endpoint
        environment = os.environ | {"SAMPLE_APP_GOODBYE": str(goodbye)}
        done = aiooffload("run", "--device", "host", "--endpoint", endpoint, SAMPLE, "x=[1]", env=environment)
        assert (done.stdout, done.returncode) == ("", 1)
        assert text in done.stderr
        assert goodbye.read_text() == "stopped\n"


def test_devices_and_version() -> None:
    """Plain lines for programs, JSON for other programs."""
    lines = aiooffload("devices").stdout.splitlines()
    assert lines[-1].startswith("host\t")
    assert json.loads(aiooffload("devices", "--json").stdout)[-1]["label"] == "host"
    assert "aiooffload " in aiooffload("version").stdout
    assert set(json.loads(aiooffload("version", "--json").stdout)) >= {"aiooffload", "python", "starlette"}


def test_doctor_on_a_terminal() -> None:
    """On a terminal it is a table with a head."""
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "aiooffload", "doctor", "--device", "host"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=secondary, stderr=subprocess.DEVNULL)
    os.close(secondary)
    text = b""
    try:
        while chunk := os.read(primary, 4096):
            text += chunk
    except OSError:
        pass  # how a terminal says that the other side is closed
    os.close(primary)
    assert process.wait(30) == 0
    head, *rows = text.decode().splitlines()
    assert head.split() == ["state", "what", "found", "advice"]
    assert any(row.startswith("ok ") for row in rows)


def test_doctor_says_by_its_status_what_does_not_work() -> None:
    """The exit status is 1 for a device that cannot be used."""
    done = aiooffload("doctor", "--device", "cuda:77", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)[-1]["state"] == "failure"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve"], "name the program"),
        (["serve", "--port", "x", SAMPLE], "--port is a int"),
        (["serve", "--host", "0.0.0.0", SAMPLE], "set a token"),
    ],
)
def test_mistakes(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is one line, and status 2."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("aiooffload serve: ")
    assert text in error
    assert error.count("\n") == 1


def test_help_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """All settings are in one table of ``serve --help``."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert all(f"AIOOFFLOAD_{name.upper()}" in text for name in Config.__dataclass_fields__)


@pytest.mark.parametrize(("command", "status"), [("serve", 0), ("version", -signal.SIGTERM)])
def test_terminated_before_it_has_begun(command: str, status: int) -> None:
    """SIGTERM while modules are still imported ends a worker, with 0 as later; other commands end as ever."""
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "aiooffload.service.cli":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
from aiooffload.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code, command, "x:y"], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (status, b"")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["version"], 0), (["devices"], 0), (["serve", "x:y"], 2), (["run", "x:y"], 2), (["serve", "--help"], 0)],
)
def test_without_the_extra(arguments: list[str], status: int) -> None:
    """Without what the extra installs, the commands that need it name it, and the others work."""
    missing = ("orjson", "ml_dtypes", "starlette", "uvicorn", "prometheus_client", "httptools", "aiosqlite")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing}))\nfrom aiooffload.__main__ import main\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(main())", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert ("pip install 'aiooffload[serve]'" in done.stderr) == (status == 2)
