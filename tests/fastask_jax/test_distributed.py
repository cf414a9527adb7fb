"""One process alone, wrong settings, and a coordinator that can't be reached.  Several processes:
test_several_processes.py."""

import socket

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fastask_jax.distributed import (
    Channel,
    DistributedConfig,
    Quiet,
    deal,
    is_main,
    local_copy,
    started,
)

GIVEN = {"coordinator": "10.0.0.2:8476", "num_processes": 2, "process_id": 1}


def test_alone_everything_is_a_plain_call():
    with started(DistributedConfig()):
        channel = Channel("alone")
        assert is_main()
        assert channel.exchange("hello", {"any": object}) == [{"any": object}]
        assert channel.on_main("main", lambda: 3) == channel.run("run", lambda: 3) == 3
        assert channel.gather("parts", lambda: {1, 2}) == [{1, 2}]
        assert deal(["a", "b", "a"]) == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            channel.run("dividing", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            channel.on_main("dividing", lambda: 1 / 0)


def test_weights_that_lie_on_the_first_device_are_not_copied():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    tree = {"w": jax.device_put(np.ones(4), NamedSharding(mesh, PartitionSpec("data")))}
    assert local_copy(tree)["w"] is tree["w"]


def test_a_quiet_writer_takes_any_call():
    assert Quiet().write(3, {"a": 1}) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"auto": True, "process_id": 0}, "finds the processes by itself"),
        ({"coordinator": "host:1"}, "belong together"),
        ({"num_processes": 2, "process_id": 0}, "belong together"),
        (GIVEN | {"process_id": 2}, "process_id is 0 to 1 for 2 processes, not 2"),
        (GIVEN | {"coordinator": "host"}, "HOST:PORT, not 'host'"),
        (GIVEN | {"start_timeout": 0}, "start_timeout must be above 0"),
    ],
)
def test_settings_that_belong_to_no_run(settings, said):
    DistributedConfig(**GIVEN)
    with pytest.raises(ValueError, match=said):
        DistributedConfig(**settings)


def test_a_channel_needs_a_deadline():
    with pytest.raises(ValueError, match="deadline must be above 0"):
        Channel("hasty", deadline=0)


def test_a_coordinator_that_is_not_there_is_a_clear_error():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        settings = {"num_processes": 2, "process_id": 1, "start_timeout": 1}
        with (
            pytest.raises(ConnectionError, match=f"nobody answers at {address} after 1 s"),
            started(DistributedConfig(coordinator=address, **settings)),
        ):
            raise AssertionError("it must not start")
