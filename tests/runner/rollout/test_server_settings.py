"""Settings that no server could serve. The others are in the table of `tests/runner/config/test_refusals.py`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from builders import make_config
from refusals import refused

from dapo_runner.config import ConfigError
from dapo_runner.parallel.world import Layout
from dapo_runner.preflight.needs import check_needs

NO_ADDRESSES = ["localhost:8000", "http://a:99999", "http://a:0", "http://a b:1", "http://a..b:1", "http://a:1#b"]
NO_ADDRESSES += ["http://[::1", "http://[x]:1", "http://[:::]:1", "http://[1.2.3.4]:1", "http://me:s3cret@a:1"]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused(url: str) -> None:
    with refused("rollout.server.urls") as caught:
        make_config(rollout={"engine": "server", "server": {"urls": [url]}})
    assert ("key_env" if "s3cret" in url else url) in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_addresses_that_are_some() -> None:
    assert make_config(rollout={"server": {"urls": ["http://[::1]:8000", "https://a.example/"]}})


AHEAD = {"max_staleness": 1, "correction": {"weights": "token"}}


@pytest.mark.parametrize(
    ("rollout", "sections", "key"),
    [
        ({}, {"advantage": {"segments": {"kind": "chain"}}, "sampler": {"oversample": 1.5}}, "sampler.oversample"),
        ({"engine": "hf", **AHEAD}, {}, "rollout.max_staleness"),
        ({"max_staleness": 1}, {}, "rollout.max_staleness"),
        ({"temperature": 2.5}, {}, "rollout.temperature"),
        ({}, {"parallel": {"gpus": 2, "rollout_tensor": 2}}, "parallel.rollout_tensor"),
    ],
)
def test_settings_that_no_server_could_serve(rollout: dict[str, Any], sections: dict[str, Any], key: str) -> None:
    with refused(key):
        make_config(rollout={"engine": "server", **rollout}, **sections)


def test_other_ranks_wait_for_as_long_as_servers_may_drain() -> None:
    def least_timeout(layout: Layout, **sections: Any) -> list[str]:
        with pytest.raises(ConfigError) as raised:  # data.template, if nothing else
            check_needs(make_config(rollout={"engine": "server", "partial": False, **AHEAD}, **sections), layout)
        return re.findall(r"^parallel\.timeout: \D*(\d+)", str(raised.value), re.MULTILINE)

    assert least_timeout(Layout(2, 2)) == ["4800"]
    assert least_timeout(Layout()) + least_timeout(Layout(2, 2), parallel={"timeout": 4800.0}) == []
