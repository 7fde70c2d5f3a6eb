"""Settings that no server could serve."""

from __future__ import annotations

import re
from typing import Any

import pytest
from builders import make_config
from refusals import refused

from dapo_runner.config import ConfigError
from dapo_runner.parallel.world import Layout
from dapo_runner.preflight.needs import check_needs


def urls(*urls: str) -> dict[str, Any]:
    return {"rollout": {"server": {"urls": list(urls)}}}


AHEAD = {"max_staleness": 1, "correction": {"weights": "token"}}


@pytest.mark.parametrize(
    ("sections", "key", "also"),
    [
        (urls("localhost:8000"), "rollout.server.urls", "http://localhost:8000"),
        (urls("http://a:1/v1"), "rollout.server.urls", "http://a:1/v1"),
        (urls("http://a:1", "http://a:1/"), "rollout.server.urls", "http://a:1"),
        (urls("http://a:80", "http://A"), "rollout.server.urls", "http://A"),
        (urls("http://a:99999"), "rollout.server.urls", "http://a:99999"),
        (urls("http://a:0"), "rollout.server.urls", "http://a:0"),
        (urls("http://a b:1"), "rollout.server.urls", "http://a b:1"),
        (urls("http://a..b:1"), "rollout.server.urls", "http://a..b:1"),
        (urls("http://a:1#b"), "rollout.server.urls", "http://a:1#b"),
        (urls("http://[::1:8000"), "rollout.server.urls", "http://[::1:8000"),
        (urls("http://me:s3cret@a:1"), "rollout.server.urls", "key_env"),
        ({"evaluation": {"k": 16}, "rollout": {"max_batch_sequences": 8}}, "rollout.max_batch_sequences", "16"),
        ({"rollout": {"engine": "hf"}, "sampler": {"oversample": 1.5}}, "sampler.oversample", "rollout.engine=server"),
        (
            {"advantage": {"segments": {"kind": "chain"}}, "sampler": {"oversample": 1.5}},
            "sampler.oversample",
            "advantage.segments",
        ),
        ({"rollout": {"engine": "hf", **AHEAD}}, "rollout.max_staleness", "rollout.engine=server"),
        ({"rollout": {"max_staleness": 1}}, "rollout.max_staleness", "rollout.correction.weights"),
        ({"rollout": {**AHEAD, "max_staleness": 2}, "sampler": {"max_age": 1}}, "sampler.max_age", "max_staleness=2"),
        ({"rollout": {"top_k": 5, "sampling_mask": True}}, "rollout.sampling_mask", "rollout.engine="),
        ({"rollout": {"temperature": 2.5}}, "rollout.temperature", "rollout.engine=server"),
        ({"parallel": {"gpus": 2, "rollout_tensor": 2}}, "parallel.rollout_tensor", ""),
    ],
)
def test_settings_that_no_server_could_serve(sections: dict[str, Any], key: str, also: str) -> None:
    rollout = {"engine": "server", **sections.get("rollout", {})}
    with refused(key) as caught:
        make_config(**{**sections, "rollout": rollout})
    assert also in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_addresses_that_are_some() -> None:
    assert make_config(**urls("http://[::1]:8000", "https://a.example/"))


def test_other_ranks_wait_for_as_long_as_servers_may_drain() -> None:
    def least_timeout(layout: Layout, **sections: Any) -> list[str]:
        rollout = {"engine": "server", "max_staleness": 1, "partial": False, "correction": {"weights": "token"}}
        with pytest.raises(ConfigError) as raised:  # data.template, if nothing else
            check_needs(make_config(rollout=rollout, **sections), layout)
        return re.findall(r"^parallel\.timeout: \D*(\d+)", str(raised.value), re.MULTILINE)

    assert least_timeout(Layout(2, 2)) == ["3000"]
    assert least_timeout(Layout()) + least_timeout(Layout(2, 2), parallel={"timeout": 3000.0}) == []
