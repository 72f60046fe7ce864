"""Settings of a KV store, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from metal_engine.errors import ConfigError
from metal_engine.kv_transfer.settings import KVTransferConfig, kv_transfer_config
from metal_engine.kv_transfer.stores.choice import open_store
from metal_engine.settings.args import EngineArgs
from tests.support.kv_blocks import LAYOUT


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_a_block_that_never_fits_into_the_queue_is_refused_at_the_start(tmp_path: Path, role: str) -> None:
    config = KVTransferConfig(
        kv_connector="disk", kv_role=role, options={"path": str(tmp_path)}, max_save_bytes=LAYOUT.nbytes - 1
    )
    if config.saves:
        with pytest.raises(ConfigError, match="more than the max_save_bytes of"):
            open_store(config, LAYOUT)
    else:
        open_store(config, LAYOUT)


def test_kv_transfer_settings_are_parsed() -> None:
    assert kv_transfer_config(EngineArgs(model="m")) is None
    config = kv_transfer_config(EngineArgs(model="m", kv_cache_dir="/kv", kv_cache_dir_size=123))
    assert config is not None and config.options == {"path": "/kv", "max_size": 123}
    assert config.loads and config.saves
    config = kv_transfer_config(
        EngineArgs(
            model="m",
            kv_transfer_config='{"kv_connector": "disk", "kv_role": "kv_producer", "kv_load_failure_policy": '
            '"fail", "kv_connector_extra_config": {"path": "/kv", "max_size": "3GiB", "load_timeout": 2}}',
        )
    )
    assert config == KVTransferConfig(
        kv_connector="disk",
        kv_role="kv_producer",
        kv_load_failure_policy="fail",
        options={"path": "/kv", "max_size": 3 << 30},
        load_timeout=2.0,
    )


DISK = '{"kv_connector": "disk", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"kv_role": "kv_both"}', "kv_connector"),
        ('{"kv_connector": "tape", "kv_role": "kv_both"}', "disk, valkey"),
        ('{"kv_connector": "disk", "kv_role": "both"}', "kv_role"),
        ('{"kv_connector": "disk"}', "kv_role"),
        ('{"kv_connector": "disk", "kv_role": "kv_both", "kv_load_failure_policy": "cry"}', "recompute, fail"),
        ('{"kv_connector": "disk", "kv_role": "kv_both", "kv_port": 1}', "unknown key 'kv_port'"),
        (DISK, "needs 'path'"),
        ('{"kv_connector": "disk", "kv_role": "kv_both", "kv_connector_extra_config": {"url": "x"}}', "'url'"),
        *(
            (f'{DISK[:-1]}, "kv_connector_extra_config": {{"path": "x", {extra}}}}}', extra.split('"')[1])
            for extra in ('"max_size": "big"', '"load_timeout": 0', '"io_threads": 1.5', '"load_timeout": true')
        ),
    ],
)
def test_wrong_settings_are_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_transfer_config(EngineArgs(model="m", kv_transfer_config=given))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="one of them"):
        kv_transfer_config(EngineArgs(model="m", kv_cache_dir="/kv", kv_transfer_config="{}"))
    with pytest.raises(ConfigError, match="prefix caching"):
        kv_transfer_config(EngineArgs(model="m", kv_cache_dir="/kv", enable_prefix_caching=False))
