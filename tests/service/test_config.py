"""Settings from flags, environment and file."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from typing import Any

import pytest

import aiooffload as ao
from aiooffload.service.config import Config, add_flags, load, table


def loaded(
    flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None, file: str | None = None
) -> Config:
    def read(path: str) -> str:
        assert path == "some.toml"
        assert file is not None
        return file

    return load((flags or {}) | ({"config": "some.toml"} if file is not None else {}), environment or {}, read)


def test_defaults() -> None:
    """Without a word everything has its default, and listens on loopback alone."""
    assert loaded() == Config()
    assert Config().host == "127.0.0.1"


def test_precedence() -> None:
    """A flag wins over the environment, which wins over the file."""
    environment = {"AIOOFFLOAD_PORT": "2", "AIOOFFLOAD_LANES": "2"}
    file = "port = 1\nlanes = 1\nmax_queue = 1\ngrace_s = 3"
    config = loaded({"port": "3", "host": None}, environment, file)
    assert (config.port, config.lanes, config.max_queue, config.grace_s) == (3, 2, 1, 3.0)


def test_every_kind_of_value() -> None:
    """Numbers, text and truth values are read from text."""
    environment = {"AIOOFFLOAD_INSECURE": "true", "AIOOFFLOAD_GRACE_S": "1.5", "AIOOFFLOAD_TOKEN": "t"}
    config = loaded({"device": "host, cuda:1"}, environment)
    assert (config.insecure, config.grace_s, config.token, config.devices) == (True, 1.5, "t", ["host", "cuda:1"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"environment": {"AIOOFFLOAD_PROT": "1"}}, "unknown settings in the environment: AIOOFFLOAD_PROT"),
        ({"file": "prot = 1"}, "unknown keys: prot"),
        ({"file": "port = '1'"}, "port in 'some.toml' is a int"),
        ({"file": "insecure = 1"}, "is a bool"),
        ({"file": "port"}, "is not TOML"),
        ({"flags": {"port": "x"}}, "--port is a int, not 'x'"),
        ({"environment": {"AIOOFFLOAD_INSECURE": "maybe"}}, "is a bool"),
        ({"flags": {"port": "-1"}}, "port is at least 0"),
        ({"flags": {"port": "65536"}}, "at most 65535"),
        ({"flags": {"grace_s": "nan"}}, "grace_s is at least 0"),
        ({"flags": {"log_format": "xml"}}, "json or console"),
        ({"flags": {"max_queue_mib": "3"}}, "max_queue_mib is at least max_body_mib"),
        ({"flags": {"device": "host,host"}}, "each device once"),
        ({"flags": {"device": "host,host:0"}}, "each device once"),
        ({"flags": {"device": "cuda:1,cuda,cuda:00"}}, "each device once"),
        ({"flags": {"device": ""}}, "each device once"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], text: str) -> None:
    """What is unknown or out of range is refused, with its name."""
    with pytest.raises(ao.UsageError, match=re.escape(text)):
        loaded(**given)


def test_file_that_is_not_there() -> None:
    """A file that cannot be read is refused."""
    with pytest.raises(ao.UsageError, match="cannot be read: No such file"):
        load({"config": "/nothing/such"}, {})


def test_other_variables_are_left_alone() -> None:
    """Variables with the prefix that are no settings of the worker are no mistake."""
    environment = {"AIOOFFLOAD_CACHE_DIR": "/x", "AIOOFFLOAD_APP": "a:b", "AIOOFFLOAD_CONFIG": "", "OTHER": "1"}
    assert loaded(environment=environment) == Config()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_variables_of_kubernetes_are_no_settings(protocol: str) -> None:
    """A Service of the worker's name is no mistake in its settings, and does not decide its port."""
    environment = {
        "AIOOFFLOAD_SERVICE_HOST": "10.96.0.7",
        "AIOOFFLOAD_SERVICE_PORT": "80",
        "AIOOFFLOAD_SERVICE_PORT_HTTP": "80",
        "AIOOFFLOAD_PORT": f"{protocol}://10.96.0.7:80",
        f"AIOOFFLOAD_PORT_80_{protocol.upper()}": f"{protocol}://10.96.0.7:80",
        f"AIOOFFLOAD_PORT_80_{protocol.upper()}_ADDR": "10.96.0.7",
    }
    assert loaded({"port": "3"}, environment).port == 3
    assert loaded(environment=environment) == Config()
    assert loaded(environment=environment | {"AIOOFFLOAD_PORT": "81"}).port == 81


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example", "127.example", "127.0.0.1.example"])
def test_strangers_need_a_token(host: str) -> None:
    """Off loopback there is a token, or it is said that none is needed; the token is in no message."""
    with pytest.raises(ao.UsageError, match="set a token"):
        loaded({"host": host})
    assert loaded({"host": host, "token": "secret"}).host == host
    assert loaded({"host": host, "insecure": True}).host == host
    with pytest.raises(ao.UsageError) as caught:
        loaded({"host": host, "token": "secret", "port": "x"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_none(host: str) -> None:
    """On loopback no token is needed."""
    assert loaded({"host": host}).token == ""


def test_flags_and_table_have_every_setting() -> None:
    """There is a flag for each setting, and the table names flag, variable and default."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    options = vars(parser.parse_args(["--max-queue", "7", "--insecure"]))
    assert (options["max_queue"], options["insecure"], options["port"]) == ("7", True, None)
    text = table()
    for one in fields(Config):
        assert f"--{one.name.replace('_', '-')} " in text
        assert f"AIOOFFLOAD_{one.name.upper()} " in text
        assert one.metadata["help"] in text
    assert load(options, {}) == Config(max_queue=7, insecure=True)
